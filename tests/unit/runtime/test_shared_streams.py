"""Shared streams without Triton: what goes out in them, and what if they break."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import numpy.typing as npt
import pytest

from llmserve.contract.shared_stream import GREETING, SharedPiece, pack, unpack
from llmserve.runtime.answer import shared_streams
from llmserve.runtime.answer.shared_streams import OpenStream, SharedStreams
from llmserve.runtime.answer.text_formatter import TextFormatter
from llmserve.runtime.drivers.batch import BatchDriver, run_batch
from llmserve.runtime.drivers.continuous import ContinuousDriver
from llmserve.runtime.protocols import Answer, Driver
from llmserve.testing import FakeRequest, make_parts
from llmserve.testing.echoes import EchoEngine

NAME, OTHER = "0123456789abcdef" * 2, "f" * 32
ENDLESS = 1_000_000


class Panic(BaseException):
    """What an extension in Rust raises."""


class Grumpy(TextFormatter):
    """Cannot format an answer with ``%`` or ``&``."""

    def format(self, answers: Sequence[Answer]) -> dict[str, npt.NDArray[Any]]:
        if any("%" in answer.text for answer in answers):
            raise ValueError("no percentages")
        if any("&" in answer.text for answer in answers):
            raise Panic("no ampersands")
        return super().format(answers)


class Model:
    """A running driver whose model has shared streams."""

    def __init__(self, driver: Driver | None = None, generator: Any = None) -> None:
        self.engine = EchoEngine(pause=0.001)
        self.driver = driver or ContinuousDriver({}, Path())
        parts = make_parts(
            generator or self.engine, formatter=Grumpy({}, Path()), stream=True,
            inputs=("logprobs", "return_log_probs"),
        )  # fmt: skip
        self.streams = SharedStreams(parts)
        self.driver.start(replace(parts, shared=self.streams))

    def open(self, name: object = NAME) -> FakeRequest:
        request = FakeRequest({"text_input": [""]}, open_shared_stream=name)
        assert self.streams.others([request]) == []
        return request

    def send(self, text: str, number: int = 1, **parameters: Any) -> FakeRequest:
        parameters = {"shared_stream": NAME, **parameters}
        request = FakeRequest({"text_input": [text]}, request_id=str(number), **parameters)
        self.driver.execute([request])
        return request


@pytest.fixture
def model() -> Iterator[Model]:
    model = Model()
    yield model
    model.engine.may_step.set()
    model.driver.finalize()
    model.streams.close()
    assert model.streams._thread is None


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def steps(stream: FakeRequest) -> list[list[SharedPiece]]:
    """Return the pieces in each response of a stream after the greeting."""
    greeting, *rest = [r for r in stream.responses if "text_output" in r.tensors]
    assert greeting.tensors["text_output"].item() == pack(GREETING)
    assert greeting.tensors["text_output"].shape == (1, 1)
    return [unpack(response.tensors["text_output"].item().decode()) for response in rest]


def pieces(stream: FakeRequest, number: int = 1) -> list[SharedPiece]:
    return [piece for step in steps(stream) for piece in step if piece.request == str(number)]


def test_a_stream_carries_the_pieces_and_the_request_itself_gets_the_whole_answer(
    model: Model,
) -> None:
    stream, request = model.open(), model.send("ab", max_tokens=5)
    wait_for(lambda: request.closed)
    early = pieces(stream)
    assert "".join(piece.text for piece in early) == "ababa"
    assert [piece.finish_reason for piece in early] == [""] * (len(early) - 1) + ["length"]
    assert early[-1] == ("1", 0, early[-1].text, "length", 2, 5, None)
    assert [response.texts for response in request.responses] == [["ababa"]]
    assert not stream.closed


def test_what_many_requests_get_in_a_step_is_one_response(model: Model) -> None:
    stream = model.open()
    model.engine.may_step.clear()
    model.engine.pause = 0.02
    requests = [model.send(f"{number}", number, max_tokens=10) for number in range(8)]
    model.engine.may_step.set()
    wait_for(lambda: all(request.closed for request in requests))
    together = [len({piece.request for piece in step}) for step in steps(stream)]
    assert together.count(8) >= 8
    for number in range(8):
        assert "".join(piece.text for piece in pieces(stream, number)) == f"{number}" * 10


def test_pieces_of_short_steps_join(model: Model) -> None:
    stream, began = model.open(), time.monotonic()
    request = model.send("ab", max_tokens=60)
    wait_for(lambda: request.closed)
    # Sixty steps of a millisecond are at least sixty milliseconds, and more on a busy machine.
    assert 3 <= len(steps(stream)) <= (time.monotonic() - began) / shared_streams._GATHERING + 1
    assert "".join(piece.text for piece in pieces(stream)) == "ab" * 30


@pytest.mark.parametrize(
    "parameters",
    [
        {"shared_stream": OTHER}, {"logprobs": 0}, {"return_log_probs": True},
        {"return_num_output_tokens": True}, {"request_id": ""},
    ],
)  # fmt: skip
def test_a_request_without_the_stream_gets_its_pieces_itself(
    model: Model, parameters: dict[str, Any]
) -> None:
    stream = model.open()
    inputs = {"text_input": ["ab"]}
    request = FakeRequest(
        inputs, **{"shared_stream": NAME, "request_id": "1", "max_tokens": 5, **parameters}
    )
    model.driver.execute([request])
    wait_for(lambda: request.closed)
    assert steps(stream) == []
    assert request.text == "ababa"
    assert len(request.responses) > 1


def test_a_request_that_does_not_stream_is_not_shown(model: Model) -> None:
    stream, request = model.open(), model.send("ab", max_tokens=5, stream=False)
    wait_for(lambda: request.closed)
    assert steps(stream) == []
    assert request.text == "ababa"


def test_the_rows_of_a_request_are_shown_each_to_its_end(model: Model) -> None:
    stream = model.open()
    request = FakeRequest(
        {"text_input": ["ab", "c"]}, request_id="1", shared_stream=NAME, max_tokens=4
    )
    model.driver.execute([request])
    wait_for(lambda: request.closed)
    for row, text in enumerate(("abab", "cccc")):
        early = [piece for piece in pieces(stream) if piece.row == row]
        assert "".join(piece.text for piece in early) == text
        assert [piece.finish_reason for piece in early if piece.finish_reason] == ["length"]
    assert [response.texts for response in request.responses] == [["abab", "cccc"]]


def test_if_the_stream_breaks_the_request_begins_again_itself(model: Model) -> None:
    stream = model.open()
    request = model.send("ab", max_tokens=ENDLESS)
    wait_for(lambda: len(steps(stream)) > 1)
    assert not request.responses
    stream.cancelled = True
    wait_for(lambda: len(request.responses) > 1)
    assert stream.closed
    assert request.text.startswith("abab")
    early = "".join(piece.text for piece in pieces(stream))
    assert request.text.startswith(early) or early.startswith(request.text)
    request.cancelled = True
    wait_for(lambda: request.closed)
    again = model.open()
    assert steps(again) == []


def test_a_stream_that_cannot_be_sent_to_is_broken(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = model.open()
    sends = stream.send

    def full(response: Any = None, flags: int = 0) -> None:
        if response is not None and response.tensors:
            raise MemoryError("Failed to increase the shared memory pool size")
        sends(response, flags)

    monkeypatch.setattr(stream, "send", full)
    request = model.send("ab", max_tokens=50)
    wait_for(lambda: request.closed)
    assert request.text == "ab" * 25
    assert stream.closed


def test_a_second_stream_of_a_name_is_refused_until_the_first_has_ended(model: Model) -> None:
    stream, second = model.open(), model.open()
    assert second.failure is not None
    assert second.failure.code == "stream_exists"
    assert second.closed
    assert not stream.closed
    other = model.open(OTHER)
    assert not other.closed
    stream.cancelled = True
    wait_for(lambda: stream.closed)
    assert not model.open().failure


@pytest.mark.parametrize("name", ["", "x", NAME.upper(), NAME + "0", 7, NAME[:-1] + "\n"])
def test_a_name_that_others_could_guess_is_refused(model: Model, name: object) -> None:
    refused = model.open(name)
    assert refused.failure is not None
    assert (refused.failure.code, refused.failure.param) == ("invalid_value", "open_shared_stream")


def test_there_are_only_so_many_streams(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmserve.runtime.answer.shared_streams._MAX_STREAMS", 1)
    model.open()
    refused = model.open(OTHER)
    assert refused.failure is not None
    assert refused.failure.code == "queue_full"


def test_a_stream_that_no_request_needs_ends_so_that_the_model_can_be_unloaded(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmserve.runtime.answer.shared_streams._IDLE", 0.3)
    stream = model.open()
    request = model.send("ab", max_tokens=ENDLESS)
    time.sleep(0.8)
    assert not stream.closed
    request.cancelled = True
    wait_for(lambda: stream.closed)
    # An empty response with the flag, not an error.
    assert stream.failure is None
    assert not stream.responses[-1].tensors
    wait_for(lambda: model.streams._thread is None)
    assert not model.open().closed


def test_unloading_ends_the_streams(model: Model) -> None:
    stream = model.open()
    model.streams.close()
    assert stream.closed


@pytest.mark.parametrize("culprit", ["%", "&"])
def test_a_formatter_that_fails_for_one_answer_costs_the_others_nothing(
    model: Model, culprit: str
) -> None:
    stream = model.open()
    model.engine.may_step.clear()
    requests = [
        model.send(text, number, max_tokens=6) for number, text in enumerate(("ab", culprit))
    ]
    model.engine.may_step.set()
    wait_for(lambda: all(request.closed for request in requests))
    assert "".join(piece.text for piece in pieces(stream, 0)) == "ababab"
    assert requests[0].text == "ababab"
    assert requests[1].failure is not None
    assert requests[1].failure.code == "model_failed"
    assert pieces(stream, 1) == []


def test_requests_may_join_a_stream_while_it_is_asked_who_needs_it() -> None:
    class User:
        waits = False

    stream = OpenStream(cast(Any, User()))
    ended = Event()

    def join() -> None:
        recent: deque[User] = deque(maxlen=300)
        while not ended.is_set():
            recent.append(User())
            stream.join(cast(Any, recent[-1]))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    joining = Thread(target=join)
    joining.start()
    try:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            assert not stream.is_needed
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        joining.join()


def test_an_end_is_sent_even_if_the_last_stream_has_just_ended(model: Model) -> None:
    assert model.streams._thread is None
    ended = Event()
    model.streams.then(ended.set)
    assert ended.wait(5)


def test_who_flushes_waits_for_what_another_thread_is_sending(model: Model) -> None:
    """The driver of ``iterative`` returns its requests to Triton after that."""
    sending, may_end, flushed = Event(), Event(), Event()

    def end() -> None:
        sending.set()
        may_end.wait(5)

    def flush() -> None:
        model.streams.flush()
        flushed.set()

    model.streams.then(end)
    assert sending.wait(5)
    flushing = Thread(target=flush)
    flushing.start()
    assert not flushed.wait(0.1)
    may_end.set()
    assert flushed.wait(5)
    flushing.join()


def test_a_request_whose_parameters_are_no_text_fails_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged, other = (FakeRequest({"text_input": ["ab"]}, max_tokens=3) for _ in range(2))
    monkeypatch.setattr(damaged, "parameters", lambda: b"\xff".decode())
    model.driver.execute(model.streams.others([damaged, other]))
    wait_for(lambda: damaged.closed and other.closed)
    assert damaged.failure is not None
    assert other.text == "aba"


def test_a_model_without_shared_streams_refuses_to_open_one() -> None:
    driver = ContinuousDriver({}, Path())
    driver.start(make_parts(EchoEngine()))
    request = FakeRequest({"text_input": ["a"]}, open_shared_stream=NAME)
    named = FakeRequest({"text_input": ["a"]}, shared_stream=NAME, max_tokens=2, stream=True)
    driver.execute([request, named])
    wait_for(lambda: request.closed and named.closed)
    driver.finalize()
    assert request.failure is not None
    assert request.failure.code == "unsupported_option"
    assert named.text == "aa"


class Batches:
    """A generator of mode ``"batch"``: nobody says when its steps end."""

    context_length = None
    eos_ids: frozenset[int] = frozenset()

    def generate(self, generations: Any, tokenizer: Any) -> None:
        engine = EchoEngine(pause=0.01)
        run_batch(engine, generations)


def test_pieces_come_together_where_nobody_says_that_a_step_has_ended() -> None:
    model = Model(BatchDriver({}, Path()), Batches())
    stream = model.open()
    requests = [
        FakeRequest({"text_input": [text]}, request_id=text, shared_stream=NAME, max_tokens=8)
        for text in "abcd"
    ]
    model.driver.execute(requests)
    wait_for(lambda: all(request.closed for request in requests))
    assert [request.text for request in requests] == [text * 8 for text in "abcd"]
    assert [len(step) for step in steps(stream)].count(4) >= 5
    for text in "abcd":
        assert "".join(p.text for s in steps(stream) for p in s if p.request == text) == text * 8
    model.streams.close()
