"""The generator behind a driver: no server, but the demo model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmserve.runtime import BatchDriver, Generator, TransformersTokenizer
from llmserve.testing import FakeRequest, demo_model_path, make_parts
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


def test_an_answer_is_the_same_beside_others(driver: BatchDriver) -> None:
    alone = ask("The capital of France is")
    driver.execute([alone])
    beside = [ask("The capital of France is"), ask("Once upon a time")]
    driver.execute(beside)
    assert beside[0].text == alone.text
    assert beside[0].text != beside[1].text


def test_the_same_seed_gives_the_same_answer(driver: BatchDriver) -> None:
    asked = [ask("Once upon a time", temperature=20, seed=seed) for seed in (1, 1, 2)]
    driver.execute(asked)
    assert asked[0].text == asked[1].text != asked[2].text


def test_a_client_that_is_gone_is_not_worked_for(driver: BatchDriver) -> None:
    gone = ask("Once upon a time", max_tokens=50)
    gone.cancelled = True
    driver.execute([gone])
    assert int(gone.responses[-1].tensors["num_output_tokens"][0, 0]) == 0
