"""Tests of the tokenizer alone: no server, no weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import llmserve
from llmserve.plugin import ModelSourceError, OptionError, demo_model_path
from llmserve.runtime import IncrementalDecoder, RequestError, Tokenizer
from llmserve.scaffold.tokenizer.tokenizer import ScaffoldTokenizer

RECIPE = "scaffold"
TEXTS = ["Hello", "Once upon a time", " two  spaces ", "a\nb", "naïve café", "日本 🙂"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return ScaffoldTokenizer({"path": "."}, demo_model_path())


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_a_stream_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    decoder = IncrementalDecoder(tokenizer.decode)
    pieces = [decoder.push(token) for token in tokenizer.encode(text)]
    assert "".join([*pieces, decoder.flush()]) == text


def test_a_conversation_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="text_input"):
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])


def test_a_model_that_it_cannot_read_is_refused_at_build_time(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_model_path(), model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelSourceError, match="has no tokenizer"):
        llmserve.build(RECIPE, str(model), output=tmp_path / "repo")
    with pytest.raises(OptionError, match="leave out --chat"):
        llmserve.build(RECIPE, "demo", output=tmp_path / "repo", chat=True)
