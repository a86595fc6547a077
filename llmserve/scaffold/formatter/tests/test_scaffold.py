"""Tests of the formatter alone: no server, no weights."""

from __future__ import annotations

import json
from pathlib import Path

from llmserve.runtime import Answer, Formatter
from llmserve.scaffold.formatter import llmserve_register_formatters
from llmserve.scaffold.formatter.formatter import ScaffoldFormatter


def answer(text: str, finish_reason: str | None = "stop") -> Answer:
    return Answer(text, "Hello", finish_reason, 2, 3, echo=False, so_far=text)


def test_an_answer_is_an_object() -> None:
    formatter: Formatter = ScaffoldFormatter({}, Path())
    tensors = formatter.format([answer(' "é"\n'), answer("", None)])
    first, second = (json.loads(value) for value in tensors["answer_json"])
    assert first["text"] == ' "é"\n'
    assert first["usage"] == {"input_tokens": 2, "output_tokens": 3}
    assert second["finish_reason"] is None
    assert [value.decode() for value in tensors["text_output"]] == [' "é"\n', ""]


def test_it_returns_the_tensors_that_it_declares() -> None:
    (declared,) = llmserve_register_formatters()
    tensors = ScaffoldFormatter({}, Path()).format([answer("a")])
    assert set(tensors) == {tensor.name for tensor in declared.outputs}
