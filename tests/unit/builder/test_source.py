"""What goes wrong where the hub is asked is told in one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmserve.builder.source import ModelSource, resolve
from llmserve.builder.source_files import tokenizer_files
from llmserve.errors import ModelSourceError

Json = dict[str, Any] | None


@pytest.mark.parametrize(
    ("page", "model"),
    [
        ("https://huggingface.co/acme/tiny", "acme/tiny"),
        ("huggingface.co/acme/tiny/", "acme/tiny"),
        ("https://huggingface.co/acme/tiny/tree/main", "acme/tiny"),
        ("https://huggingface.co/acme/tiny/blob/main/a.gguf?x=1", "acme/tiny:a.gguf"),
        ("https://huggingface.co/acme/tiny/blob/main/config.json", "acme/tiny"),
    ],
)
def test_a_page_of_the_hub_leads_to_the_name_of_its_model(page: str, model: str) -> None:
    with pytest.raises(ModelSourceError) as caught:
        resolve(page, revision="", weights=["*"], kind="huggingface", report=lambda _: None)
    assert str(caught.value).endswith(f"name its model: {model}")


@pytest.mark.parametrize("name", ["qwen3:0.6b", "acme/tiny:latest", "hf.example/a/b:Q4_K_M"])
def test_a_name_of_ollama_says_what_it_is_and_what_to_give(name: str) -> None:
    with pytest.raises(ModelSourceError, match=f"{name} is a name as Ollama gives them") as caught:
        resolve(name, revision="", weights=["*"], kind="huggingface", report=lambda _: None)
    assert "OWNER/NAME, or its GGUF file; docs/guides/from-ollama.md" in str(caught.value)


@pytest.mark.parametrize(
    ("files", "is_one"),
    [
        ({"tokenizer.json": {}}, True),
        ({"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}}, False),
        ({"tokenizer_config.json": {}, "chat_template.jinja": {}}, False),
        ({"tokenizer_config.json": {"tokenizer_class": "ByT5Tokenizer"}}, True),
        ({"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["own.Own", None]}}}, True),
        ({"config.json": {"model_type": "canine"}}, True),
        ({"config.json": {"model_type": "gpt2"}}, False),
    ],
)
def test_a_folder_whose_tokenizer_has_no_tokens_is_refused_by_the_build(
    tmp_path: Path, files: Mapping[str, object], is_one: bool
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    source = ModelSource("mine", tmp_path)
    if is_one:
        assert tokenizer_files(source)
    else:
        with pytest.raises(ModelSourceError, match="mine has no tokenizer: put "):
            tokenizer_files(source)


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 2}, None, [2]),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 3]}, [3, 7]),
        ({"eos_token_id": 2}, {"eos_token_id": None}, [2]),
        ({"eos_token_id": 2, "text_config": {"eos_token_id": 5}}, {}, [5]),
        ({}, None, []),
        (None, None, []),
    ],
)
def test_the_tokens_that_end_an_answer_are_those_of_the_most_particular_file(
    config: dict[str, Any] | None,
    generation: dict[str, Any] | None,
    ends: list[int],
    tmp_path: Path,
) -> None:
    files = {"config.json": config, "generation_config.json": generation}
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    assert ModelSource("m", tmp_path).end_ids() == ends
