"""What goes out together in a stream of several answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from llmserve.client import Piece
from llmserve.errors import ModelDiedError
from llmserve_gateway.streams import merged


async def answer(
    *texts: str, beat: asyncio.Event | None = None, error: Exception | None = None
) -> AsyncGenerator[Piece, None]:
    for text in texts:
        if beat is not None:
            await beat.wait()
        yield Piece(text)
    if error is not None:
        raise error


def batches(*answers: AsyncGenerator[Piece, None]) -> list[list[tuple[int, str]]]:
    async def read() -> list[list[tuple[int, str]]]:
        return [[(p.index, p.text) for p in pieces] async for pieces in merged(answers)]

    return asyncio.run(read())


def test_what_is_ready_at_the_same_time_is_one_batch() -> None:
    found = batches(answer("a", "b"), answer("x"))
    assert found[0] == [(0, "a"), (0, "b"), (1, "x")]


def test_a_single_answer_is_as_it_comes() -> None:
    assert batches(answer("a", "b")) == [[(0, "a")], [(0, "b")]]


def test_what_has_arrived_before_a_failure_is_not_lost() -> None:
    seen: list[Sequence[Piece]] = []

    async def read() -> None:
        async for pieces in merged([answer("a", error=ModelDiedError("gone")), answer("x")]):
            seen.append(pieces)

    with pytest.raises(ModelDiedError):
        asyncio.run(read())
    assert {piece.text for pieces in seen for piece in pieces} >= {"a"}
