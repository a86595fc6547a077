"""Tests of the driver with a generator that records batches: no server, no weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import Driver, Generation, Tokenizer
from llmserve.testing import FakeRequest, make_parts
from llmserve.scaffold.batching.driver import ScaffoldDriver


class Echo:
    """A generator that repeats the prompt and records which requests ran together."""

    context_length: int | None = 100
    eos_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        self.batches.append([generation.prompt for generation in generations])
        for generation in generations:
            for token in generation.prompt_ids * generation.max_tokens:
                generation.push(token)


def started_driver(echo: Echo, width: int) -> Driver:
    driver = ScaffoldDriver({"width": width}, Path())
    driver.start(make_parts(echo))
    return driver


def ask(prompt: str, **parameters: Any) -> FakeRequest:
    return FakeRequest({"text_input": [prompt]}, **parameters)


def test_the_shortest_run_first_and_at_most_width_together() -> None:
    echo = Echo()
    requests = [ask(prompt) for prompt in ("cccc", "a", "bb", "ddddd", "eee")]
    started_driver(echo, 2).execute(requests)
    assert echo.batches == [["a", "bb"], ["eee", "cccc"], ["ddddd"]]
    assert all(request.closed for request in requests)


def test_a_request_that_cannot_be_served_fails_alone() -> None:
    requests = [ask("a", max_tokens=-1), ask("bb"), ask("")]
    started_driver(Echo(), 3).execute(requests)
    assert "max_tokens" in (requests[0].error or "")
    assert requests[1].text == "bbbbbbbb"
    assert "empty" in (requests[2].error or "")
