"""Tests of the generator with the demo model's weights: no server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmserve.plugin import demo_model_path
from llmserve.runtime import BatchDriver, Generation, Params, Stepper, TransformersTokenizer
from llmserve.testing import FakeRequest, make_parts
from llmserve.scaffold.stepper.generator import ScaffoldGenerator

SETTINGS = {"path": ".", "device": "cpu", "dtype": "float32"}
TOKENIZER = TransformersTokenizer({"path": "."}, demo_model_path())


@pytest.fixture(scope="module")
def generator() -> ScaffoldGenerator:
    return ScaffoldGenerator(SETTINGS, demo_model_path())


@pytest.fixture
def steps(generator: ScaffoldGenerator) -> Stepper:
    return generator.stepper(TOKENIZER)


def generation(prompt: str, max_tokens: int) -> Generation:
    return Generation(
        TOKENIZER.encode(prompt),
        Params(),
        max_tokens=max_tokens,
        eos_ids=TOKENIZER.eos_ids,
        decode=TOKENIZER.decode,
    )


def test_a_request_joins_and_ends_before_another(steps: Stepper) -> None:
    long, short = generation("Once upon a time", 8), generation("The capital of France is", 2)
    steps.admit(long)
    assert not steps.step().failed
    steps.admit(short)
    while not short.done:
        assert not steps.step().failed
    assert (len(long.token_ids), len(short.token_ids)) == (3, 2)
    assert steps.live == 1


def test_a_request_that_was_dropped_continues(steps: Stepper) -> None:
    whole, dropped = generation("Once upon a time", 6), generation("Once upon a time", 6)
    for one in (whole, dropped):
        steps.admit(one)
    steps.step()
    steps.drop(dropped)
    while not whole.done:
        steps.step()
    assert len(dropped.token_ids) == 1
    steps.admit(dropped)
    while not dropped.done:
        steps.step()
    assert dropped.text == whole.text


def test_it_also_runs_whole_batches(generator: ScaffoldGenerator) -> None:
    driver = BatchDriver({}, Path())
    driver.start(make_parts(generator, tokenizer=TOKENIZER, inputs=["temperature", "seed"]))
    options: list[dict[str, Any]] = [{"seed": 1}, {"seed": 1}, {"seed": 2}]
    requests = [
        FakeRequest({"text_input": ["Once upon a time"]}, temperature=20, **seed)
        for seed in options
    ]
    driver.execute(requests)
    assert requests[0].text == requests[1].text != requests[2].text
