"""Answers that a shared stream shows early, whatever arrives first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from llmserve.client.exchange import AtOnce, open_exchange
from llmserve.client.results import Piece, gather
from llmserve.client.shared_streams import Inbox, SharedStream
from llmserve.contract.options import is_carried
from llmserve.contract.shared_stream import GREETING, SharedPiece, pack, unpack
from tests.unit.client.test_exchange import STREAM, answer

SHARING = replace(STREAM, shared_stream=True, rows=8)
NAME = "0" * 32


def begin(prompts: Sequence[str] = ("a",), **options: Any) -> tuple[AtOnce, list[Any]]:
    exchange = open_exchange(SHARING, prompts, options, pieces=True)
    assert isinstance(exchange, AtOnce)
    requests = exchange.next_round()
    assert exchange.share(requests, NAME) == [request.id for request in requests]
    return exchange, requests


def early_piece(request: str, text: str, reason: str = "", row: int = 0) -> SharedPiece:
    return SharedPiece(request, row, text, reason, 1, 1)


def cut(text: str, marks: Sequence[int]) -> list[str]:
    ends = sorted({mark % (len(text) + 1) for mark in marks} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


TEXTS = st.text(min_size=1, max_size=30)
MARKS = st.lists(st.integers(0, 30), max_size=6)


@given(TEXTS, MARKS, MARKS, st.integers(0, 8), st.randoms(use_true_random=False))
def test_an_answer_is_whole_in_any_order_of_arrival(
    text: str, early: list[int], own: list[int], lost: int, random: Any
) -> None:
    """The stream may break anywhere; the request's own responses begin with the answer."""
    exchange, (request,) = begin()
    previews = cut(text, early)
    last = len(previews) - 1
    queue = [
        early_piece(request.id, p, "stop" if n == last else "") for n, p in enumerate(previews)
    ]
    queue = queue[: len(queue) - lost] if lost else queue
    parts = cut(text, own)
    responses = [
        answer(request.id, (part, "stop" if n == len(parts) - 1 else ""))
        for n, part in enumerate(parts)
    ]
    pieces: list[Piece] = []
    while responses:
        if queue and random.random() < 0.5:
            pieces += exchange.preview(queue.pop(0))
        else:
            pieces += exchange.take(responses.pop(0))
    for late in queue:
        pieces += exchange.preview(late)
    (whole,) = gather(pieces, 1)
    assert (whole.text, whole.finish_reason) == (text, "stop")
    assert sum(piece.finish_reason is not None for piece in pieces) == 1


def test_each_prompt_of_a_request_is_counted_by_itself() -> None:
    exchange, (request,) = begin(["a", "b"])
    pieces = exchange.preview(early_piece(request.id, "ab", "stop", row=0))
    pieces += exchange.preview(early_piece(request.id, "x", row=1))
    pieces += exchange.take(answer(request.id, ("ab", "stop"), ("xyz", "length")))
    assert [(p.index, p.text, p.finish_reason) for p in pieces] == [
        (0, "ab", "stop"), (1, "x", None), (1, "yz", "length")
    ]  # fmt: skip


def test_the_pieces_of_several_requests_are_of_their_prompts() -> None:
    exchange = open_exchange(replace(SHARING, rows=1), ["a", "b"], {}, pieces=True)
    assert isinstance(exchange, AtOnce)
    first, second = exchange.next_round()
    exchange.share([first, second], NAME)
    assert exchange.preview(early_piece(second.id, "y"))[0].index == 1
    assert exchange.preview(early_piece(first.id, "x"))[0].index == 0


@pytest.mark.parametrize("row", [-1, 1])
def test_a_piece_of_a_prompt_that_was_not_sent_is_dropped(row: int) -> None:
    exchange, (request,) = begin()
    assert exchange.preview(early_piece(request.id, "x", row=row)) == []


def test_only_streamed_text_of_a_model_that_declares_it_can_share() -> None:
    def can_share(info: Any = SHARING, *, pieces: bool = True, **options: Any) -> bool:
        return open_exchange(info, ["a"], options, pieces=pieces).can_share

    assert can_share()
    assert not can_share(STREAM)
    assert not can_share(pieces=False)
    assert not can_share(logprobs=0)
    assert not can_share(prompt_logprobs=0)
    assert not is_carried({"return_num_output_tokens": True}.get)
    assert not can_share(return_log_probs=True)
    assert can_share(return_log_probs=False)


def test_pieces_that_nobody_has_read_join() -> None:
    async def read() -> list[Any]:
        inbox = Inbox()
        for text in "abc":
            inbox.put(early_piece("1", text))
        inbox.put(early_piece("2", "x"))
        inbox.put(early_piece("1", "d", "stop"))
        inbox.put(None)
        return await inbox.take(None)

    assert asyncio.run(read()) == [
        early_piece("1", "abc"), early_piece("2", "x"), early_piece("1", "d", "stop"), None
    ]  # fmt: skip


def test_a_reader_waits_for_what_arrives_and_no_longer_than_it_may() -> None:
    async def read() -> None:
        inbox = Inbox()
        reading = asyncio.ensure_future(inbox.take(5))
        await asyncio.sleep(0)
        inbox.put(1)
        inbox.put(2)
        assert await reading == [1, 2]
        with pytest.raises(asyncio.TimeoutError):
            await inbox.take(0.01)
        inbox.put(3)
        assert await inbox.take(0.01) == [3]

    asyncio.run(read())


def test_a_cancelled_reader_stops_even_if_something_arrives_at_that_moment() -> None:
    async def read() -> None:
        inbox = Inbox()
        reading = asyncio.ensure_future(inbox.take(5))
        await asyncio.sleep(0.01)
        inbox.put(1)
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(read())


class Refusing:
    """A channel of a server that refuses to open a stream, in its final response."""

    def __init__(self, code: str) -> None:
        self.opened: list[Any] = []
        self._message = service_pb2.ModelStreamInferResponse(
            error_message=f"[llmserve {code}] not now"
        )
        parameters = self._message.infer_response.parameters
        parameters["triton_final_response"].bool_param = True

    def stream(self, requests: list[Any], seconds: float | None) -> Any:
        del seconds
        self.opened += requests
        return self

    async def read(self, stream: Any, seconds: float | None = None) -> Any:
        del stream, seconds
        return self._message

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize("code", ["stream_exists", "queue_full"])
def test_a_refused_stream_is_not_asked_for_again_at_once(code: str) -> None:
    async def test() -> None:
        channel = Refusing(code)
        stream = SharedStream(channel, SHARING)
        for _ in range(5):
            assert not await stream.ready()
        (request,) = channel.opened
        # Triton's traces have the ids of requests.
        assert stream.name not in request.id

    asyncio.run(test())


@given(st.lists(st.tuples(TEXTS, st.integers(0, 3), TEXTS, st.none() | st.integers(0, 9))))
def test_what_is_packed_is_unpacked(rows: list[tuple[str, int, str, int | None]]) -> None:
    pieces = [SharedPiece(*row[:3], "", 1, 2, row[3]) for row in rows]
    assert unpack(pack(pieces).decode()) == pieces


def test_the_greeting_has_no_pieces_and_an_answer_of_another_model_is_an_error() -> None:
    assert unpack(pack(GREETING).decode()) == []
    for other in ("Paris is nice.", "7", '{"shared_stream": 2}', "[[1]]"):
        with pytest.raises(ValueError):
            unpack(other)
