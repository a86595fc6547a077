"""Continuous batching without Triton: how requests join, end and fail."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from llmserve.runtime import Generation, Progress
from llmserve.runtime.drivers.continuous import ContinuousDriver
from llmserve.testing import FakeRequest, make_parts
from llmserve.testing.echoes import EchoEngine, SlowFormatter
from llmserve.testing.fake import FakeModelException

# However slow the machine is, an answer this long is still running when a test checks it.
ENDLESS = 1_000_000


class Model:
    """A running driver with its engine."""

    def __init__(self, engine: EchoEngine | None = None) -> None:
        self.engine = engine or EchoEngine(pause=0.001)
        self.formatter = SlowFormatter()
        self.driver = ContinuousDriver({}, Path())
        self.driver.start(make_parts(self.engine, formatter=self.formatter))

    def send(self, text: str, **parameters: Any) -> FakeRequest:
        request = FakeRequest({"text_input": [text]}, **parameters)
        self.driver.execute([request])
        return request


@pytest.fixture
def model() -> Iterator[Model]:
    model = Model()
    yield model
    model.engine.may_step.set()
    model.driver.finalize()
    assert not model.engine.running


def wait_until_closed(*requests: FakeRequest) -> None:
    deadline = time.monotonic() + 10
    while not all(request.closed for request in requests):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_execute_returns_at_once_and_answers_follow(model: Model) -> None:
    model.engine.may_step.clear()
    request = model.send("ab", max_tokens=5)
    assert not request.closed
    model.engine.may_step.set()
    wait_until_closed(request)
    assert request.text == "ababa"
    assert len(request.responses) == 1


def test_a_request_joins_a_running_one_and_ends_before_it(model: Model) -> None:
    long = model.send("ab", max_tokens=ENDLESS)
    while not model.engine.batch_sizes:
        time.sleep(0.001)
    short = model.send("cd", max_tokens=3)
    wait_until_closed(short)
    assert not long.closed
    assert short.text == "cdc"
    assert 2 in model.engine.batch_sizes
    long.cancelled = True
    wait_until_closed(long)


@pytest.mark.parametrize("running", [False, True])
def test_steps_do_not_wait_for_a_constraint_to_be_compiled(model: Model, running: bool) -> None:
    long = model.send("ab", max_tokens=ENDLESS if running else 1)
    slow, bomb = model.send("slow", max_tokens=5), model.send("bomb")
    short = model.send("cd", max_tokens=3)
    wait_until_closed(short)
    assert not slow.closed
    assert not bomb.closed
    model.formatter.compiled.set()
    wait_until_closed(slow, bomb)
    assert slow.text == "slows"
    assert bomb.error == "compiling it takes too long"
    long.cancelled = True
    wait_until_closed(long)


@pytest.mark.parametrize("running", [False, True])
def test_a_request_that_is_cancelled_does_not_wait_for_its_constraint(
    model: Model, running: bool
) -> None:
    long = model.send("ab", max_tokens=ENDLESS if running else 1)
    slow = model.send("slow", max_tokens=5)
    slow.cancelled = True
    wait_until_closed(slow)
    assert slow.text == ""
    long.cancelled = True
    wait_until_closed(long)
    assert not model.driver._pending


def test_a_request_with_a_constraint_that_is_not_ready_is_answered_when_unloading() -> None:
    model = Model()
    request = model.send("slow")
    model.driver.finalize()
    assert request.error == "the model failed: RuntimeError: the model is being unloaded"


def test_cancellation_is_not_polled_for_an_answered_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llmserve.runtime.drivers.continuous._CANCEL_INTERVAL", 0)
    model = Model()
    for _ in range(25):
        wait_until_closed(*(model.send("ab", max_tokens=count) for count in range(1, 9)))
    # The fake request raises if it is polled after its answer, which ends the driver's thread.
    assert model.driver.is_ready()
    model.driver.finalize()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_that_cannot_be_answered_gets_an_error_and_is_dropped(
    model: Model, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    send = FakeRequest.send

    def send_without_memory(request: FakeRequest, response: Any = None, flags: int = 0) -> None:
        if request is culprit and not response.error:
            raise FakeModelException("no shared memory is left")
        send(request, response, flags=flags)

    monkeypatch.setattr(FakeRequest, "send", send_without_memory)
    model.engine.may_step.clear()
    culprit = model.send("ab", max_tokens=ENDLESS if stream else 3, stream=stream)
    good = model.send("cd", max_tokens=9)
    model.engine.may_step.set()
    wait_until_closed(culprit, good)
    assert (culprit.error or "").startswith(
        "the model failed: FakeModelException: no shared memory is left"
    )
    assert good.text == "cdcdcdcdc"
    wait_until_closed(model.send("e", max_tokens=5))
    assert not model.engine.running


def gaps_between_pieces(
    model: Model, monkeypatch: pytest.MonkeyPatch, sending_times: Sequence[float]
) -> list[float]:
    """Return the time between the pieces of a stream, the sending of which takes that long."""
    sent: list[float] = []
    send = FakeRequest.send

    def send_slowly(request: FakeRequest, response: Any = None, flags: int = 0) -> None:
        if len(sent) < len(sending_times):
            time.sleep(sending_times[len(sent)])
        sent.append(time.monotonic())
        send(request, response, flags=flags)

    monkeypatch.setattr(FakeRequest, "send", send_slowly)
    request = model.send("ab", max_tokens=ENDLESS, stream=True)
    deadline = time.monotonic() + 30
    while len(sent) < len(sending_times):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    request.cancelled = True
    wait_until_closed(request)
    return [after - before for before, after in pairwise(sent)]


def test_pieces_that_take_long_to_send_come_less_often(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Steps take 1 ms. After 40 pieces, the average is at least 1.7 ms, which is 3 % of 57 ms.
    assert gaps_between_pieces(model, monkeypatch, [0.002] * 42)[40] > 0.05


def test_one_long_pause_does_not_make_later_pieces_rare(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaps = gaps_between_pieces(model, monkeypatch, [0, 0, 0.5, *[0] * 20])
    assert median(gaps[3:20]) < 0.1


def test_the_metrics_match_the_requests(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    admit = model.engine.admit

    def with_a_known_beginning(generation: Generation) -> None:
        generation.cached_tokens = 2
        admit(generation)

    monkeypatch.setattr(model.engine, "admit", with_a_known_beginning)
    families = model.driver._runner.metrics.families
    metrics = {name: family.metric for name, family in families.items()}
    assert metrics["llmserve_cache_tokens"].value == model.engine.cache_tokens, "already at start"
    wait_until_closed(
        model.send("abc", max_tokens=4), model.send("?"), model.send("de", max_tokens=6)
    )
    model.driver.finalize()
    assert not model.driver._runner.metrics.families, "they would outlive the server's memory"
    assert metrics["llmserve_input_tokens_total"].value == 5
    assert metrics["llmserve_cached_tokens_total"].value == 4
    assert metrics["llmserve_output_tokens_total"].value == 10
    assert metrics["llmserve_first_token_seconds_count"].value == 2
    assert metrics["llmserve_token_seconds_count"].value == 8
    assert metrics["llmserve_running_sequences"].value == 0
    assert metrics["llmserve_cache_used_tokens"].value == 0


def test_a_refused_or_failing_request_affects_no_other(model: Model) -> None:
    good = model.send("ab", max_tokens=30)
    wrong, refused, culprit = model.send("ab", max_tokens=0), model.send("?"), model.send("!")
    wait_until_closed(good, wrong, refused, culprit)
    assert good.text == "ab" * 15
    assert "max_tokens" in (wrong.error or "")
    assert refused.error == "no questions"
    assert (culprit.error or "").startswith("the model failed: ValueError: cannot go on")


@pytest.mark.parametrize(
    ("prompt", "error"),
    [("#", "MemoryError: no memory left"), ("~", "RuntimeError: Panic: index out of bounds")],
)
def test_a_step_that_fails_is_an_error_of_all_requests_and_the_next_is_served(
    model: Model, prompt: str, error: str
) -> None:
    good, culprit = model.send("ab", max_tokens=ENDLESS), model.send(prompt)
    wait_until_closed(good, culprit)
    assert good.error == culprit.error
    assert (good.error or "").startswith(f"the model failed: {error}")
    after = model.send("cd", max_tokens=4)
    wait_until_closed(after)
    assert after.text == "cdcd"


def test_unloading_fails_requests_that_still_wait() -> None:
    model = Model()
    request = model.send("ab", max_tokens=ENDLESS)
    model.driver.finalize()
    assert request.closed
    assert "being unloaded" in (request.error or "")
    assert not model.engine.running


def test_a_stream_among_many_gets_its_first_piece_at_once_and_the_others_together(
    model: Model,
) -> None:
    streams = [model.send("ab", max_tokens=200, stream=True) for _ in range(8)]
    wait_until_closed(*streams)
    for stream in streams:
        assert stream.text == "ab" * 100
        assert len(stream.responses[0].texts[0]) <= 2
        assert len(stream.responses) < 100


class EndsTheThread(EchoEngine):
    def step(self) -> Progress:
        self.running.clear()
        raise GeneratorExit


def test_a_driver_whose_thread_has_ended_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    model = Model(EndsTheThread())
    assert model.driver.is_ready()
    model.send("a", max_tokens=2)
    deadline = time.monotonic() + 10
    while model.driver.is_ready():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    model.driver.finalize()
