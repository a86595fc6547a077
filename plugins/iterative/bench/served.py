"""Through a real Triton: so many requests at a time, or as they happen to arrive."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from llmserve.client import connect_async

if TYPE_CHECKING:
    from llmserve.client import AsyncClient

PATIENCE = 240.0
"""No request is waited for longer than that, in seconds."""


def rate(
    url: str, model: str, prompts: Sequence[str], tokens: int, *, pieces: bool = False
) -> float:
    """Return the tokens a second of requests at the same time."""
    seconds, made = asyncio.run(_at_once(url, model, prompts, tokens, pieces))
    if made != len(prompts) * tokens:
        raise RuntimeError(f"{model} made {made} tokens, not {len(prompts) * tokens}")
    return made / seconds


async def _at_once(
    url: str, model: str, prompts: Sequence[str], tokens: int, pieces: bool
) -> tuple[float, int]:
    async with _connected(url, model) as client:

        async def ask(prompt: str) -> int:
            if pieces:
                asked = client.stream(model, prompt, max_tokens=tokens, ignore_eos=True)
                # The baseline tells no counts; a word is a token.
                return sum([len(piece.text.split()) async for piece in asked])
            answer = await client.generate(model, prompt, max_tokens=tokens, ignore_eos=True)
            return answer.output_tokens or 0

        begun = time.perf_counter()
        made = sum(await asyncio.gather(*map(ask, prompts)))
        return time.perf_counter() - begun, made


@asynccontextmanager
async def _connected(url: str, model: str) -> AsyncIterator[AsyncClient]:
    """Connect, and learn how the model wants to be asked, before any clock runs.

    One thread for all requests: what clients take, engine and server lack on the same machine.
    """
    async with connect_async(url, timeout=PATIENCE) as client:
        await client.model(model)
        yield client


@dataclass(frozen=True)
class Load:
    """Requests of mixed lengths that arrive at random."""

    lengths: Sequence[int]
    arrivals: Sequence[float]

    @classmethod
    def poisson(cls, requests: int, per_second: float, seed: int) -> Load:
        """Return a load of 8 to 256 new tokens each."""
        chance = random.Random(seed)
        moment, arrivals = 0.0, []
        for _ in range(requests):
            arrivals.append(moment)
            moment += chance.expovariate(per_second)
        return cls([chance.randint(8, 256) for _ in range(requests)], arrivals)


@dataclass(frozen=True)
class Passage:
    """What became of a load."""

    per_second: float
    first_token: float


def run(url: str, model: str, load: Load, prompts: Sequence[str]) -> Passage:
    """Send a load; tell requests a second and the median time to the first token."""
    return asyncio.run(_as_they_arrive(url, model, load, prompts))


async def _as_they_arrive(url: str, model: str, load: Load, prompts: Sequence[str]) -> Passage:
    async with _connected(url, model) as client:
        begun = time.perf_counter()

        async def ask(due: float, prompt: str, tokens: int) -> tuple[float, float]:
            await asyncio.sleep(begun + due - time.perf_counter())
            first = 0.0
            asked = client.stream(model, prompt, max_tokens=tokens, ignore_eos=True)
            async for piece in asked:
                first = first or (time.perf_counter() if piece.text else 0.0)
            return first - begun - due, time.perf_counter()

        asked = zip(load.arrivals, prompts, load.lengths, strict=True)
        ends = await asyncio.gather(*(ask(*one) for one in asked))
        seconds = max(end for _, end in ends) - begun
        return Passage(len(ends) / seconds, median(first for first, _ in ends))
