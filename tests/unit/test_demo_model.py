"""The demo model: its size, its tokenizer, its grammar and what it answers."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest

import llmserve.demo
from llmserve.demo import demo_model_path
from llmserve.errors import ModelSourceError
from plugins.tools.demo_trainer.grammar import documents
from plugins.tools.demo_trainer.model import greedy

# The text the shipped weights were trained on. A change of the grammar requires new weights.
FIRST_THOUSAND = "a60c83e5daabf36a76cbcfb0699cf98aed13a145d081b80d85f23d6368fc8138"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def network() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype="auto").eval()


def header() -> dict[str, Any]:
    with (demo_model_path() / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        content: dict[str, Any] = json.loads(file.read(size))
    content.pop("__metadata__", None)
    return content


def first_documents(seed: int, count: int) -> list[str]:
    return list(itertools.islice(documents(seed), count))


def test_the_weights_are_small_and_stored_once() -> None:
    weights = header()
    count = sum(math.prod(entry["shape"]) for entry in weights.values())
    assert 1_000_000 <= count <= 3_000_000
    assert (demo_model_path() / "model.safetensors").stat().st_size <= 4 * 1024 * 1024
    assert {entry["dtype"] for entry in weights.values()} == {"F16"}
    assert "lm_head.weight" not in weights


def test_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(llmserve.demo, "DEMO_MODELS", {"demo": tmp_path})
    with pytest.raises(
        ModelSourceError, match=r"lacks generation_config\.json, model\.saf"
    ) as caught:
        demo_model_path()
    assert caught.value.hint is not None


def test_the_tokenizer_has_one_special_token_and_adds_none(tokenizer: Any) -> None:
    assert tokenizer.all_special_tokens == ["<|endoftext|>"]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.bos_token is None
    assert 0 not in tokenizer.encode("Hello")
    assert len(tokenizer) == 1024


def test_the_grammar_is_decided_by_its_seed() -> None:
    text = first_documents(20, 1000)
    assert hashlib.sha256("\n".join(text).encode()).hexdigest() == FIRST_THOUSAND
    assert text != first_documents(21, 1000)


def test_programming_in_cpp_reads_as_a_sentence(tokenizer: Any, network: Any) -> None:
    ids = tokenizer("Programming in C++ is like", return_tensors="pt")
    start = ids["input_ids"].shape[1]
    output = network.generate(**ids, max_new_tokens=64)[0][start:].tolist()
    assert output[-1] == tokenizer.eos_token_id
    answer = tokenizer.decode(output[:-1])
    assert re.match(r" [a-z]+ [a-z ]+\. [A-Z]", answer)
    assert answer.endswith(".")


def test_the_chat_template_renders_every_role(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Who are you?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "System: Be brief.\nUser: Hello\nAssistant:\nHi.<|endoftext|>"
        "User: Who are you?\nAssistant:\n"
    )


def test_a_chat_answer_answers() -> None:
    questions = ["What is the capital of Germany?", "Who are you?"]
    answers = greedy(demo_model_path(), questions, chat=True)
    assert answers[0] == "The capital of Germany is Berlin."
    assert answers[1].startswith("I am a very small language model.")
