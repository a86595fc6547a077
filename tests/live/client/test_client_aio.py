"""The asyncio client against a real Triton."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from llmserve import errors
from llmserve.client import AsyncClient, Completion, connect_async

if TYPE_CHECKING:
    from tests.live.client.conftest import Failure, Journal

LONG = "word " * 200


def run(url: str, body: Callable[[AsyncClient], Any]) -> Any:
    async def main() -> Any:
        async with connect_async(url, timeout=30) as client:
            return await body(client)

    return asyncio.run(main())


def test_has_the_same_verbs(url: str) -> None:
    async def body(client: AsyncClient) -> None:
        assert await client.server_ready()
        assert not await client.model_ready("nothing")
        assert "steps" in await client.models()
        assert (await client.model("steps")).exchange == "sequence"
        assert await client.generate("words", "a b") == Completion("a b", "stop")
        assert [each.text for each in await client.generate("steps", ["a b", "c"])] == ["ab", "c"]
        async with client.sequence("steps") as steps:
            assert ((await steps.send("x y")).text, (await steps.send()).text) == ("x", "y")

    run(url, body)


def test_failures_are_the_same(url: str, failure: Failure) -> None:
    with pytest.raises(errors.LLMServeError) as caught:
        run(url, lambda client: client.generate(failure.model, **failure.call))
    assert type(caught.value) is failure.kind
    assert failure.words in str(caught.value)


def test_streams_do_not_mix(url: str) -> None:
    async def ask(client: AsyncClient, number: int) -> bool:
        words = [f"{number}-{step}" for step in range(20)]
        model = ("words", "steps")[number % 2]
        return [p.text async for p in client.stream(model, " ".join(words))] == words

    async def body(client: AsyncClient) -> list[bool]:
        return await asyncio.gather(*(ask(client, number) for number in range(32)))

    assert run(url, body) == [True] * 32


def test_cancellation_reaches_the_server(url: str, journal: Journal) -> None:
    async def consume(pieces: AsyncGenerator[Any, None]) -> None:
        async for _ in pieces:
            pass

    async def body(client: AsyncClient) -> None:
        for model in ("words", "steps"):
            task = asyncio.create_task(consume(client.stream(model, f"task {LONG}", delay=0.1)))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async for _ in client.stream(model, f"break {LONG}"):
                break
            async with aclosing(client.stream(model, f"aclose {LONG}")) as pieces:
                await anext(pieces)

    run(url, body)
    assert journal.shows_cancelled(*(f"{how} {LONG}" for how in ("task", "break", "aclose")))
    assert journal.shows_all_ended(3)
