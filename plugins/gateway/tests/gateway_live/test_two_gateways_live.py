"""Two gateways in front of one Triton, each with a shared stream of its own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2 as httpx

from llmserve.testing import LiveTriton

from .process import Gateway

COUNT = 16
OPTIONS: dict[str, Any] = {"max_tokens": 32, "ignore_eos": True, "temperature": 1.5}
"""And a seed, so that all answers differ."""


async def streamed(
    client: httpx.AsyncClient, gateway: Gateway, model: str, seed: int, *, may_break: bool
) -> str:
    """Return the text of a stream, up to where it breaks."""
    body = {"model": model, "prompt": "Once", "seed": seed, "stream": True, **OPTIONS}
    text = ""
    try:
        async with client.stream("POST", f"{gateway.url}/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
    except httpx.TransportError:
        if not may_break:
            raise
    return text


def stream_all(gateways: list[Gateway], model: str, killed: Gateway | None = None) -> list[str]:
    """Return the texts of streams through gateways in turn, of which one may be killed."""

    async def go() -> list[str]:
        async with httpx.AsyncClient(timeout=60) as client:
            tasks = []
            for seed in range(COUNT):
                through = gateways[seed % len(gateways)]
                stream = streamed(client, through, model, seed, may_break=through is killed)
                tasks.append(asyncio.ensure_future(stream))
            if killed is not None:
                await asyncio.sleep(0.1)
                killed.process.kill()
            return await asyncio.gather(*tasks)

    return asyncio.run(go())


def test_each_stream_of_two_gateways_has_its_own_whole_answer(
    triton: LiveTriton, gateway: Gateway, model: str
) -> None:
    expected = [
        triton.client.generate(model, "Once", seed=seed, **OPTIONS).text for seed in range(COUNT)
    ]
    assert len(set(expected)) == COUNT
    second = Gateway(triton)
    try:
        for _ in range(2):
            assert stream_all([gateway, second], model) == expected
        found = stream_all([gateway, second], model, killed=second)
        assert found[::2] == expected[::2]
        assert all(map(str.startswith, expected[1::2], found[1::2]))
        # What the killed one left behind keeps nobody from an answer.
        assert stream_all([gateway], model) == expected
    finally:
        second.process.kill()
        second.process.wait()
