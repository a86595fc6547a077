"""Continuous batching without Triton: who joins, who leaves, and what fails whom."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmserve.runtime.continuous import ContinuousDriver
from llmserve.testing import FakeRequest, make_parts
from llmserve.testing.fake import FakeModelException
from tests.echoes import Echoes

# However slow the machine is, such an answer is under way when a test looks at it.
ENDLESS = 1_000_000


class Model:
    """A driver at work."""

    def __init__(self) -> None:
        self.engine = Echoes(pause=0.001)
        self.driver = ContinuousDriver({}, Path())
        self.driver.start(make_parts(self.engine))

    def send(self, text: str, **asked: Any) -> FakeRequest:
        request = FakeRequest({"text_input": [text]}, **asked)
        self.driver.execute([request])
        return request


@pytest.fixture
def model() -> Iterator[Model]:
    made = Model()
    yield made
    made.engine.may_step.set()
    made.driver.finalize()
    assert not made.engine.under_way


def closed(*requests: FakeRequest) -> None:
    deadline = time.monotonic() + 10
    while not all(request.closed for request in requests):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_triton_is_let_go_at_once_and_answers_come_later(model: Model) -> None:
    model.engine.may_step.clear()
    request = model.send("ab", max_tokens=5)
    assert not request.closed
    model.engine.may_step.set()
    closed(request)
    assert request.text == "ababa"
    assert len(request.responses) == 1


def test_a_request_joins_one_that_is_under_way_and_ends_before_it(model: Model) -> None:
    long = model.send("ab", max_tokens=ENDLESS)
    while not model.engine.beside:
        time.sleep(0.001)
    short = model.send("cd", max_tokens=3)
    closed(short)
    assert not long.closed
    assert short.text == "cdc"
    assert 2 in model.engine.beside
    long.cancelled = True
    closed(long)


def test_triton_is_not_asked_after_a_request_that_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llmserve.runtime.continuous._CANCEL_INTERVAL", 0)
    model = Model()
    for _ in range(25):
        closed(*(model.send("ab", max_tokens=count) for count in range(1, 9)))
    # Whom the fake answers with an error has ended.
    assert model.driver.is_ready()
    model.driver.finalize()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_who_cannot_be_given_an_answer_gets_an_error_and_holds_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    send = FakeRequest.send

    def full(request: FakeRequest, response: Any = None, flags: int = 0) -> None:
        if request is culprit and not response.error:
            raise FakeModelException("no shared memory is left")
        send(request, response, flags=flags)

    monkeypatch.setattr(FakeRequest, "send", full)
    model.engine.may_step.clear()
    culprit = model.send("ab", max_tokens=ENDLESS if stream else 3, stream=stream)
    good = model.send("cd", max_tokens=9)
    model.engine.may_step.set()
    closed(culprit, good)
    told = "the model failed: FakeModelException: no shared memory is left"
    assert (culprit.error, good.text) == (told, "cdcdcdcdc")
    closed(model.send("e", max_tokens=5))
    assert not model.engine.under_way


def test_the_figures_are_those_of_what_happened(model: Model) -> None:
    figures = {name: made.metric for name, made in model.driver._metrics.families.items()}
    assert figures["llmserve_cache_tokens"].value == model.engine.cache_tokens, (
        "before anybody asks"
    )
    closed(model.send("abc", max_tokens=4), model.send("?"), model.send("de", max_tokens=6))
    model.driver.finalize()
    assert not model.driver._metrics.families, "they would outlive the server's memory"
    assert figures["llmserve_input_tokens_total"].value == 5
    assert figures["llmserve_output_tokens_total"].value == 10
    assert figures["llmserve_first_token_seconds_count"].value == 2
    assert figures["llmserve_token_seconds_count"].value == 8
    assert (
        figures["llmserve_running_sequences"].value
        == figures["llmserve_cache_used_tokens"].value
        == 0
    )


def test_one_that_is_refused_or_fails_does_so_alone(model: Model) -> None:
    good = model.send("ab", max_tokens=30)
    wrong, refused, culprit = model.send("ab", max_tokens=0), model.send("?"), model.send("!")
    closed(good, wrong, refused, culprit)
    assert good.text == "ab" * 15
    assert "max_tokens" in (wrong.error or "")
    assert refused.error == "no questions"
    assert culprit.error == "the model failed: ValueError: cannot go on"


def test_a_step_that_fails_is_told_to_all_and_the_next_request_is_served(model: Model) -> None:
    good, culprit = model.send("ab", max_tokens=ENDLESS), model.send("#")
    closed(good, culprit)
    assert good.error == culprit.error == "the model failed: MemoryError: no memory left"
    after = model.send("cd", max_tokens=4)
    closed(after)
    assert after.text == "cdcd"


def test_unloading_tells_who_still_waits() -> None:
    model = Model()
    request = model.send("ab", max_tokens=ENDLESS)
    model.driver.finalize()
    assert request.closed
    assert "being unloaded" in (request.error or "")
    assert not model.engine.under_way


def test_a_panic_of_a_library_does_not_end_the_thread(model: Model) -> None:
    culprit = model.send("~", max_tokens=9)
    closed(culprit)
    assert culprit.error == "the model failed: RuntimeError: Panic: index out of bounds"
    after = model.send("cd", max_tokens=4)
    closed(after)
    assert after.text == "cdcd"


def test_a_stream_of_many_gets_its_first_piece_at_once_and_the_others_together(
    model: Model,
) -> None:
    streams = [model.send("ab", max_tokens=200, stream=True) for _ in range(8)]
    closed(*streams)
    for stream in streams:
        assert stream.text == "ab" * 100
        assert len(stream.responses[0].texts[0]) <= 2
        assert len(stream.responses) < 100


def test_a_thread_that_has_ended_is_told_to_who_asks(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.driver.is_ready()
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    monkeypatch.setattr(model.driver, "_send", lambda now: (_ for _ in ()).throw(GeneratorExit))
    model.send("a", max_tokens=2)
    model.driver._threads[0].join(10)
    assert not model.driver.is_ready()
    model.engine.under_way.clear()
