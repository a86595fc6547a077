"""Tests of the generator with a driver and the demo model's weights: no server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmserve.plugin import demo_model_path
from llmserve.runtime import BatchDriver, Generator, TransformersTokenizer
from llmserve.testing import FakeRequest, make_parts
from llmserve.scaffold.generator.generator import ScaffoldGenerator

SETTINGS = {"path": ".", "device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def generator() -> Generator:
    return ScaffoldGenerator(SETTINGS, demo_model_path())


@pytest.fixture
def driver(generator: Generator) -> BatchDriver:
    driver = BatchDriver({}, Path())
    tokenizer = TransformersTokenizer({"path": "."}, demo_model_path())
    inputs = ["temperature", "seed"]
    driver.start(make_parts(generator, tokenizer=tokenizer, inputs=inputs))
    return driver


def ask(prompt: str, **parameters: Any) -> FakeRequest:
    return FakeRequest({"text_input": [prompt]}, **parameters)


def test_every_request_of_a_batch_gets_the_length_it_asked_for(driver: BatchDriver) -> None:
    requests = [ask("The capital of France is", max_tokens=n) for n in (1, 4, 7)]
    driver.execute(requests)
    assert [int(r.responses[-1].tensors["num_output_tokens"][0, 0]) for r in requests] == [1, 4, 7]


def test_an_answer_is_the_same_alone_and_in_a_batch(driver: BatchDriver) -> None:
    alone = ask("The capital of France is")
    driver.execute([alone])
    batch = [ask("The capital of France is"), ask("Once upon a time")]
    driver.execute(batch)
    assert batch[0].text == alone.text
    assert batch[0].text != batch[1].text


def test_the_same_seed_gives_the_same_answer(driver: BatchDriver) -> None:
    requests = [ask("Once upon a time", temperature=20, seed=seed) for seed in (1, 1, 2)]
    driver.execute(requests)
    assert requests[0].text == requests[1].text != requests[2].text


def test_a_cancelled_request_generates_nothing(driver: BatchDriver) -> None:
    request = ask("Once upon a time", max_tokens=50)
    request.cancelled = True
    driver.execute([request])
    assert int(request.responses[-1].tensors["num_output_tokens"][0, 0]) == 0
