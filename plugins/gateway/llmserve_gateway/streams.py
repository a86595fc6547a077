"""The pieces of several answers, in the order of their arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from llmserve.client import Piece


async def each(pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Sequence[Piece], None]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield (piece,)


async def flattened(
    batches: AsyncGenerator[Sequence[Piece], None],
) -> AsyncGenerator[Piece, None]:
    async with aclosing(batches):
        async for pieces in batches:
            for piece in pieces:
                yield piece


def merged(
    answers: Sequence[AsyncGenerator[Piece, None]],
) -> AsyncGenerator[Sequence[Piece], None]:
    """Yield the pieces of several answers in the order of their arrival."""
    return each(answers[0]) if len(answers) == 1 else _joined(answers)


async def _joined(
    answers: Sequence[AsyncGenerator[Piece, None]],
) -> AsyncGenerator[Sequence[Piece], None]:
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()

    async def forward(index: int, answer: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(answer) as pieces:
                async for piece in pieces:
                    queue.put_nowait(replace(piece, index=index))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(forward(index, answer)) for index, answer in enumerate(answers)]
    try:
        remaining = len(tasks)
        while remaining:
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            if pieces := [item for item in items if isinstance(item, Piece)]:
                yield pieces
            for item in items:
                if isinstance(item, Exception):
                    raise item
            remaining -= items.count(None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
