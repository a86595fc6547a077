"""What the plugin does beyond the suite, on a real Triton."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import RequestRejectedError
from llmserve.testing import LiveTriton
from tests.support import order_of_ends

PROMPTS = ("Programming in C++ is like", "Once upon a time", "Hello", "The capital of France is")
PROMPT = PROMPTS[0]
# A process without torch starts in a tenth of the time.
LIGHT: dict[str, Any] = {"tokenizer": "tokenizers"}


@pytest.fixture
def model(triton: LiveTriton, converted: Path) -> str:
    return triton.build("openvino", str(converted))


@pytest.fixture
def in_batches(triton: LiveTriton, converted: Path) -> str:
    return triton.build("openvino", str(converted), batching="dynamic", **LIGHT)


@pytest.fixture
def by_torch(triton: LiveTriton) -> str:
    return triton.build("hf")


@pytest.mark.parametrize("batching", ["continuous", "dynamic", "iterative", "static"])
def test_behind_every_driver_it_gives_the_answers_of_generate(
    triton: LiveTriton, converted: Path, by_torch: str, batching: str
) -> None:
    options = {} if batching == "continuous" else {"batching": batching, **LIGHT}
    model = triton.build("openvino", str(converted), **options)
    expected = [triton.client.generate(by_torch, p, max_tokens=32).text for p in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = pool.map(lambda p: triton.client.generate(model, p, max_tokens=32).text, PROMPTS)
        assert list(found) == expected


@pytest.mark.parametrize(
    "wish",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"min_tokens": 40},
        {"end_id": 5},
        {"end_id": 2**31 - 1, "min_tokens": 4},
        {"stop_words": [" in"]},
        {"ignore_eos": True},
    ],
    ids=str,
)
def test_wishes_mean_what_they_mean_elsewhere(
    triton: LiveTriton, model: str, by_torch: str, wish: dict[str, Any]
) -> None:
    for prompt in PROMPTS[:2]:
        expected = triton.client.generate(by_torch, prompt, max_tokens=48, **wish)
        assert triton.client.generate(model, prompt, max_tokens=48, **wish) == expected


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"bad_words": ["the"]}, "does not take bad_words"),
        ({"presence_penalty": 3.0}, "presence_penalty must be from -2 to 2"),
    ],
)
def test_what_openvino_cannot_do_is_refused(
    triton: LiveTriton, model: str, in_batches: str, wish: dict[str, Any], message: str
) -> None:
    for name in (model, in_batches):
        with pytest.raises(RequestRejectedError, match=message) as caught:
            triton.client.generate(name, PROMPT, **wish)
        assert "failed" not in str(caught.value)
        assert triton.client.generate(name, PROMPT, max_tokens=4).output_tokens == 4


def test_a_request_joins_while_another_is_under_way(triton: LiveTriton, model: str) -> None:
    # A fast engine can be done before a busy machine runs the second client; one that lets
    # nobody join is first every time.
    tries = (order_of_ends(triton, model, long=450, short=4) for _ in range(3))
    assert ["short", "long"] in tries


def test_a_client_that_leaves_frees_the_engine(triton: LiveTriton, converted: Path) -> None:
    """With room for one sequence, the next is served at once only if the first has gone."""
    model = triton.build("openvino", str(converted), max_sequences=1, **LIGHT)
    asked: dict[str, Any] = {"max_tokens": 450, "ignore_eos": True}
    began = time.perf_counter()
    triton.client.generate(model, PROMPT, **asked)
    whole = time.perf_counter() - began
    for _ in triton.client.stream(model, PROMPT, **asked):
        break
    began = time.perf_counter()
    triton.client.generate(model, PROMPT, max_tokens=1)
    assert time.perf_counter() - began < whole / 2
