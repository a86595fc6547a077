"""Shared streams on a real Triton: nothing is lost, whatever breaks, leaves or is slow."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from llmserve.client import AsyncClient, connect_async
from llmserve.client.exchange import AtOnce
from llmserve.errors import LLMServeError
from llmserve.testing import LiveTriton
from tests import light
from tests.light import light_model

pytestmark = pytest.mark.long

OPTIONS: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}
DRIVERS = {
    "iterative": {"plugin": "iterative"},
    "continuous": {"plugin": "iterative", "batching": "continuous"},
    "batch": {"plugin": "hf"},
}
SECONDS = 60


def prompts(count: int) -> list[str]:
    return [f"Number {number} of the list is" for number in range(count)]


@pytest.fixture(params=list(DRIVERS))
def model(triton: LiveTriton, request: pytest.FixtureRequest) -> str:
    arguments: dict[str, Any] = DRIVERS[request.param]
    return triton.build(**arguments)


@pytest.fixture
def own_pieces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of requests' own responses that are news to the client.

    The end of an answer may be: it can arrive before what the stream shows of it.
    """
    found: list[str] = []
    take = AtOnce.take

    def counting(self: AtOnce, response: Any) -> Any:
        pieces = take(self, response)
        found.extend(piece.text for piece in pieces if piece.text)
        return pieces

    monkeypatch.setattr(AtOnce, "take", counting)
    return found


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, SECONDS))


@asynccontextmanager
async def connected(triton: LiveTriton) -> AsyncIterator[AsyncClient]:
    async with connect_async(triton.server.grpc_url, timeout=SECONDS) as client:
        yield client


async def streamed(client: AsyncClient, model: str, prompt: str, pause: float = 0) -> str:
    text = ""
    async for piece in client.stream(model, prompt, **OPTIONS):
        text += piece.text
        if pause:
            await asyncio.sleep(pause)
    return text


async def all_streamed(client: AsyncClient, model: str, count: int) -> list[str]:
    return await asyncio.gather(*(streamed(client, model, prompt) for prompt in prompts(count)))


async def whole(client: AsyncClient, model: str, count: int) -> list[str]:
    answers = await asyncio.gather(
        *(client.generate(model, prompt, **OPTIONS) for prompt in prompts(count))
    )
    return [answer.text for answer in answers]


def test_streams_arrive_in_the_shared_stream_and_join_to_the_whole_answers(
    triton: LiveTriton, model: str, own_pieces: list[str]
) -> None:
    async def test() -> None:
        async with connected(triton) as client:
            expected = await whole(client, model, 12)
            # On a busy machine, the requests may not wait until the stream has opened.
            for _ in range(5):
                own_pieces.clear()
                assert await all_streamed(client, model, 12) == expected
                if len(own_pieces) <= 12:
                    break
            assert len(own_pieces) <= 12
            # Several prompts in one request are several rows.
            texts = dict.fromkeys(range(3), "")
            async for piece in client.stream(model, prompts(3), **OPTIONS):
                texts[piece.index] += piece.text
            assert list(texts.values()) == (await whole(client, model, 3))

    run(test())


def test_clients_do_not_notice_each_other(triton: LiveTriton, model: str) -> None:
    async def test() -> None:
        async with connected(triton) as one, connected(triton) as other:
            found = tuple(await asyncio.gather(
                all_streamed(one, model, 6), all_streamed(other, model, 6),
                asyncio.to_thread(blocking),
            ))  # fmt: skip
            expected = await whole(one, model, 6)
            assert found == (expected, expected, expected[0])

    def blocking() -> str:
        return "".join(
            piece.text for piece in triton.client.stream(model, prompts(1)[0], **OPTIONS)
        )

    run(test())


def test_a_stream_that_breaks_costs_no_answer(triton: LiveTriton, model: str) -> None:
    async def test() -> None:
        async with connected(triton) as client:
            expected = await whole(client, model, 12)
            tasks = [
                asyncio.ensure_future(streamed(client, model, prompt, pause=0.001))
                for prompt in prompts(12)
            ]
            for _ in range(3):
                await asyncio.sleep(0.05)
                client._streams[model].close()
            assert await asyncio.gather(*tasks) == expected
            assert await all_streamed(client, model, 12) == expected

    run(test())


@pytest.mark.parametrize("seed", [1, 2])
def test_clients_that_leave_and_clients_that_are_slow_harm_no_other(
    triton: LiveTriton, model: str, seed: int
) -> None:
    chance = random.Random(seed)

    async def leave(client: AsyncClient, prompt: str, after: int) -> None:
        async with aclosing(client.stream(model, prompt, **OPTIONS)) as pieces:
            async for _ in pieces:
                if not (after := after - 1):
                    return

    async def test() -> None:
        async with connected(triton) as client:
            expected = await whole(client, model, 24)
            readers, leaving = [], []
            for number, prompt in enumerate(prompts(24)):
                await asyncio.sleep(chance.random() * 0.03)
                if chance.random() < 0.4:
                    leaving.append(
                        asyncio.ensure_future(leave(client, prompt, chance.randint(1, 9)))
                    )
                else:
                    pause = chance.choice([0, 0, 0.02])
                    readers.append(
                        (number, asyncio.ensure_future(streamed(client, model, prompt, pause)))
                    )
            for number, reader in readers:
                assert await reader == expected[number]
            await asyncio.gather(*leaving)

    run(test())


def test_a_model_is_loaded_again_and_unloaded_while_a_stream_is_open(triton: LiveTriton) -> None:
    model = triton.build(light.PLUGIN, str(light_model()), name="shared-again", **light.OPTIONS)
    config = triton.repository / model / "config.pbtxt"

    async def test() -> None:
        async with connected(triton) as client:
            expected = await whole(client, model, 4)
            for again in range(3):
                tasks = [
                    asyncio.ensure_future(streamed(client, model, prompt)) for prompt in prompts(4)
                ]
                if not again:
                    config.touch()
                    await asyncio.to_thread(triton.load, model)
                assert await asyncio.gather(*tasks) == expected
            began = time.monotonic()
            await asyncio.to_thread(triton.unload, model)
            # A stream that stays open would hold it for good; a busy machine takes its time.
            assert time.monotonic() - began < 45

    run(test())
    triton.load(model)


def test_a_client_that_is_closed_ends_its_streams_and_leaves_no_task(
    triton: LiveTriton, caplog: pytest.LogCaptureFixture
) -> None:
    model = triton.build("iterative", batching="continuous")

    async def test() -> None:
        client = connect_async(triton.server.grpc_url, timeout=SECONDS)
        assert await streamed(client, model, prompts(1)[0])
        reading = asyncio.ensure_future(read(client))
        await asyncio.sleep(0.1)
        await client.close()
        await asyncio.wait_for(reading, 10)

    async def read(client: AsyncClient) -> None:
        with suppress(asyncio.CancelledError):
            async for _ in client.stream(model, "x", max_tokens=400, ignore_eos=True):
                pass

    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.wait_for(test(), SECONDS))
    loop.close()
    gc.collect()
    assert "Task was destroyed" not in caplog.text


def test_two_processes_of_a_model_each_get_a_stream(
    triton: LiveTriton, own_pieces: list[str]
) -> None:
    model = triton.build("hf", instances=2)

    async def test() -> None:
        async with connected(triton) as client:
            expected = await whole(client, model, 16)
            # Triton chooses the process that is asked next.
            until = time.monotonic() + 60
            opened = 0
            while opened < 2 and time.monotonic() < until:
                assert await all_streamed(client, model, 16) == expected
                opened = len(client._streams[model]._open)
            assert opened == 2
            own_pieces.clear()
            assert await all_streamed(client, model, 16) == expected
            assert len(own_pieces) <= 16

    run(test())


def test_streams_of_a_triton_that_is_killed_end(tmp_path: Path) -> None:
    async def endless(client: AsyncClient, model: str, prompt: str) -> str:
        try:
            async for _ in client.stream(model, prompt, max_tokens=400, ignore_eos=True):
                pass
        except LLMServeError as error:
            return type(error).__name__
        return "answered"

    async def test() -> None:
        async with connected(triton) as client:
            answers = [
                asyncio.ensure_future(endless(client, model, prompt)) for prompt in prompts(8)
            ]
            await asyncio.sleep(0.2)
            os.kill(triton.server.process.pid, signal.SIGKILL)
            assert "UnreachableError" in await asyncio.gather(*answers)
            # The next one fails at once, too: it does not wait for a stream to open.
            began = time.monotonic()
            assert await endless(client, model, "Is anybody there?") == "UnreachableError"
            assert time.monotonic() - began < 10

    with LiveTriton.start(tmp_path / "models") as triton:
        model = triton.build("iterative", batching="continuous")
        run(test())
