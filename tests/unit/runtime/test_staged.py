"""Constraints on parts of an answer, from random scores that like the marks between them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import llmserve.demo
from llmserve.client import (
    Completion,
    ModelInfo,
    TensorInfo,
    ToolFormats,
    Tools,
    read_calls,
)
from llmserve.runtime import Generation, Sampler, TransformersTokenizer
from llmserve.runtime.answer.params import read_params
from llmserve.runtime.answer.text_formatter import TextFormatter

FOLDER = Path(llmserve.demo.__file__).parent / "model"
MARKS = ["<think>", "</think>", "<tool_call>"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CALL = {"type": "object", "properties": {"name": {"const": "add"}}, "required": ["name"],
        "additionalProperties": False}  # fmt: skip
THINKING = {"thinking_marks": ["</think>", "</think>", "<think>"]}
FORM = {"json_schema": json.dumps(SCHEMA)}


class Model:
    """A tokenizer that has the marks as tokens, or one that splits them; and its formatter."""

    def __init__(self, tokenizer: TransformersTokenizer) -> None:
        self.tokenizer = tokenizer
        self.formatter = TextFormatter({}, FOLDER)

    def answer(self, prompt: str, options: Mapping[str, Any], seed: int) -> Generation:
        """Return an answer from random scores, which prefer to begin and to go on with marks."""
        tokenizer = self.tokenizer
        generation = Generation(
            tokenizer.encode(prompt),
            read_params({"temperature": 1.0, "seed": seed, **options}),
            max_tokens=120,
            eos_ids=tokenizer.eos_ids,
            decode=tokenizer.decode,
        )
        generation.constraint = self.formatter.constrain(generation, tokenizer)
        sampler = Sampler(generation, tokenizer)
        numbers = np.random.default_rng(seed)
        marks = [tokenizer.encode(mark, special=False) for mark in MARKS]
        planned: list[int] = []
        while not generation.done:
            scores = numbers.normal(size=len(tokenizer._tokenizer) + 16).astype(np.float32)
            if not planned and numbers.random() < 0.15:
                planned = list(marks[numbers.integers(len(marks))])
            if planned:
                scores[planned.pop(0)] += 30
            for token in sampler.forced():
                generation.push(token)
            if not generation.done:
                generation.push(sampler.choose(scores))
        return generation


@pytest.fixture(scope="module", params=["whole", "split"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = FOLDER
    if request.param == "whole":
        from transformers import AutoTokenizer

        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(FOLDER)
        tokenizer.add_tokens(MARKS)
        tokenizer.save_pretrained(folder)
    made = Model(TransformersTokenizer({"path": "."}, folder))
    assert (len(made.tokenizer.encode(MARKS[0], special=False)) == 1) == (request.param == "whole")
    yield made
    made.formatter.close()


def fits(text: str, schema: Mapping[str, Any]) -> bool:
    return not list(Draft202012Validator(schema).iter_errors(json.loads(text)))


def seeds(count: int) -> Iterator[int]:
    return iter(range(count))


@pytest.mark.parametrize("prompt", ["Tell me", "Tell me <think>\n"])
def test_a_form_begins_after_the_thinking(model: Model, prompt: str) -> None:
    thought = finished = direct = 0
    for seed in seeds(40):
        generation = model.answer(prompt, {**THINKING, **FORM}, seed)
        text = generation.text
        inside = prompt.endswith("\n") or text.startswith("<think>")
        thought += inside
        if generation.finish_reason == "stop":
            _, end, answer = text.partition("</think>") if inside else ("", "-", text)
            assert end, "an answer must have come"
            assert fits(answer, SCHEMA), text
            finished += 1
            direct += not inside
        elif not inside:
            assert text[0] == "{"
    assert thought > 3
    assert finished > 3
    assert direct or prompt.endswith("\n")


def test_thinking_ends_with_its_budget(model: Model) -> None:
    ids = model.tokenizer.encode("</think>", special=False)
    for seed in seeds(25):
        budget = seed % 9
        options = {**THINKING, **FORM, "thinking_token_budget": budget}
        generation = model.answer("Tell me <think>", options, seed)
        thought, end, answer = generation.text.partition("</think>")
        assert end
        assert fits(answer, SCHEMA)
        # A character may be finished first, and so may a mark that was on its way.
        used = len(generation.token_ids) - len(model.tokenizer.encode(answer, special=False))
        assert used <= budget + 2 * len(ids) + 4, thought


def test_a_budget_needs_no_form_and_no_thinking(model: Model) -> None:
    options = {**THINKING, "thinking_token_budget": 4}
    opened = 0
    for seed in seeds(40):
        text = model.answer("Tell me", options, seed).text
        if text.startswith("<think>"):
            opened += 1
            thought, end, _ = text.removeprefix("<think>").partition("</think>")
            assert end, text
            assert len(model.tokenizer.encode(thought, special=False)) < 30
    assert opened
    assert model.formatter.constrain(_plain(model), model.tokenizer) is None


def _plain(model: Model) -> Generation:
    tokenizer = model.tokenizer
    params = read_params({**THINKING, "call_marks": ["<tool_call>"]})
    return Generation([1], params, max_tokens=1, eos_ids=frozenset({0}), decode=tokenizer.decode)


def test_an_answer_in_a_form_may_be_a_call_instead(model: Model) -> None:
    kinds = set()
    for seed in seeds(40):
        options = {**THINKING, **FORM, "call_marks": ["<tool_call>"]}
        generation = model.answer("Tell me", options, seed)
        text = generation.text
        if text.startswith("<think>"):
            text = text.partition("</think>")[2]
        if text.startswith("<tool_call>"):
            kinds.add("call")
        elif generation.finish_reason == "stop":
            assert fits(text, SCHEMA)
            kinds.add("form")
    assert kinds == {"call", "form"}


def test_a_call_has_its_own_form_and_the_text_around_it_none(model: Model) -> None:
    options = {"call_marks": ["<tool_call>"], "call_schema": json.dumps(CALL)}
    calls = texts = 0
    for seed in seeds(30):
        generation = model.answer("Tell me", options, seed)
        before, *after = generation.text.split("<tool_call>")
        texts += bool(before)
        for number, part in enumerate(after, 1):
            match = re.match(r"\s*(\{[^}]*\})", part)
            assert match or (number == len(after) and generation.finish_reason == "length"), part
            if match:
                assert fits(match[1], CALL)
                calls += 1
    assert calls > 5
    assert texts


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder"])
def test_an_answer_with_a_form_and_tools_is_in_the_form_or_a_call(
    model: Model, family: str
) -> None:
    function = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    request = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": function}],
    }
    tools = Tools.of(request)
    assert tools is not None
    inputs = {name: TensorInfo(name, "BYTES", (1,)) for name in ("text_input", "json_schema")}
    info = ModelInfo("m", "stream", True, None, inputs, {}, made_by_llmserve="1")

    async def template(name: str) -> str:
        return "{{ tools }}"

    formats = ToolFormats(template, parsers=[family])
    asked = tools.options({**request, **FORM})
    options = asyncio.run(formats.place(info, asked, tools))
    new_reader = asyncio.run(formats.readers(info, tools, options))
    assert new_reader is not None
    sent = {name: options[name] for name in ("json_schema", "call_marks", "call_schema")}
    called = formed = 0
    for seed in seeds(60):
        generation = model.answer("Tell me", sent, seed)
        answer = read_calls(new_reader(), Completion(generation.text, generation.finish_reason))
        if answer.finish_reason == "length":
            continue
        assert answer.tool_calls or fits(answer.text, SCHEMA), generation.text
        assert all(type(json.loads(call.arguments)) is dict for call in answer.tool_calls)
        called, formed = called + bool(answer.tool_calls), formed + (not answer.tool_calls)
    assert formed
    # Marks of many tokens leave random text too few of them to end its call.
    assert called or len(model.tokenizer.encode(MARKS[2], special=False)) > 1


@settings(max_examples=6, deadline=None)
@given(st.text(max_size=12), st.integers(0, 2**31))
def test_the_end_may_be_split_into_any_tokens(thought: str, seed: int) -> None:
    """What precedes the mark may share a token with its beginning."""
    tokenizer = TransformersTokenizer({"path": "."}, FOLDER)
    formatter = TextFormatter({}, FOLDER)
    params = read_params({**THINKING, **FORM, "seed": seed})
    generation = Generation(
        tokenizer.encode("<think>"), params, max_tokens=200, eos_ids=tokenizer.eos_ids,
        decode=tokenizer.decode,
    )  # fmt: skip
    generation.constraint = formatter.constrain(generation, tokenizer)
    sampler = Sampler(generation, tokenizer)
    scores = np.zeros(1024, dtype=np.float32)
    for token in tokenizer.encode(f"{thought}</think>", special=False):
        assert not sampler.forced()
        generation.constrain(scores.copy())
        generation.push(token)
    while not generation.done:
        generation.push(sampler.choose(scores))
    formatter.close()
    assert fits(generation.text.rpartition("</think>")[2], SCHEMA)
