"""The runtime class without Triton: it returns the ids and texts of the transformers tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from llmserve.plugin import demo_model_path
from llmserve.runtime import RequestError, TransformersTokenizer
from llmserve_tokens.chat import ChatTemplate
from llmserve_tokens.runtime import FileTokenizer

LINES = ["the cat sat on the mat", "programming in C++ is like", "naïve café, 東京 and 🙂"]
MESSAGES = [{"role": "user", "content": "Where is <b>Paris</b>?"}]
SETTINGS = {"path": "."}


def sentence_pieces() -> Tokenizer:
    """A tokenizer like sentencepiece: spaces are letters, and unknown letters become bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special[:3], initial_alphabet=[], show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    for name in special[3:]:
        vocab.setdefault(name, len(vocab))
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(params=["demo", "sentence pieces"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "demo":
        return Path(shutil.copytree(demo_model_path(), tmp_path / "demo"))
    sentence_pieces().save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "clean_up_tokenization_spaces": False,
        "chat_template": "{{ messages | tojson }}{{ eos_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_ids_and_texts_are_those_of_transformers(folder: Path) -> None:
    ours, theirs = FileTokenizer(SETTINGS, folder), TransformersTokenizer(SETTINGS, folder)
    assert ours.eos_ids == theirs.eos_ids
    assert ours.eos_ids
    for text in (*LINES, "  two  spaces ", "\n\ttabs", "unseen: ÿ ሴ", "</s> <|endoftext|>"):
        for special in (True, False):
            ids = ours.encode(text, special=special)
            assert ids == theirs.encode(text, special=special)
            assert ours.decode(ids) == theirs.decode(ids)
    assert ours.encode_chat(MESSAGES) == theirs.encode_chat(MESSAGES)


DEMO = FileTokenizer(SETTINGS, demo_model_path())


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    ids = DEMO.encode(text)
    without_eos = [token for token in ids if token not in DEMO.eos_ids]
    assert DEMO.decode(ids) == DEMO.decode(without_eos)
    if len(without_eos) == len(ids):
        assert DEMO.decode(ids) == text


def test_a_model_without_a_template_refuses_a_conversation(tmp_path: Path) -> None:
    shutil.copy(demo_model_path() / "tokenizer.json", tmp_path)
    tokenizer = FileTokenizer(SETTINGS, tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="has no chat template"):
        tokenizer.encode_chat(MESSAGES)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "file"}, "file"),
        ({"chat_template.json": json.dumps({"chat_template": "json"})}, "json"),
        ({}, "named"),
    ],
)
def test_where_a_template_comes_from(files: dict[str, str], expected: str, tmp_path: Path) -> None:
    shutil.copy(demo_model_path() / "tokenizer.json", tmp_path)
    named: Any = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "named"},
    ]
    config = {"eos_token": "<|endoftext|>", "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    tokenizer = FileTokenizer(SETTINGS, tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)) == expected


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no\nroles') }}", "{{ messages[7]['content'] }}", "{{ messages + 1 }}"],
)
def test_an_error_in_a_template_is_one_line(template: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses") as caught:
        ChatTemplate(template, {}).render(MESSAGES)
    assert "Traceback" not in str(caught.value)


def test_a_template_cannot_reach_into_python() -> None:
    with pytest.raises(RequestError, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render(MESSAGES)
