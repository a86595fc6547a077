"""Through a real Triton: so many requests at a time, or as they happen to arrive."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmserve.client import Client

PATIENCE = 240.0
"""No request is waited for longer than that, in seconds."""


def rate(
    client: Client, model: str, prompts: Sequence[str], tokens: int, *, pieces: bool = False
) -> float:
    """Return the tokens a second of requests at the same time."""

    def ask(prompt: str) -> int:
        if pieces:
            asked = client.stream(
                model, prompt, max_tokens=tokens, ignore_eos=True, timeout=PATIENCE
            )
            # The baseline tells no counts; a word is a token.
            return sum(len(piece.text.split()) for piece in asked)
        answer = client.generate(
            model, prompt, max_tokens=tokens, ignore_eos=True, timeout=PATIENCE
        )
        return answer.output_tokens or 0

    with ThreadPoolExecutor(len(prompts)) as pool:
        begun = time.perf_counter()
        made = sum(pool.map(ask, prompts))
        seconds = time.perf_counter() - begun
    if made != len(prompts) * tokens:
        raise RuntimeError(f"{model} made {made} tokens, not {len(prompts) * tokens}")
    return made / seconds


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


def run(client: Client, model: str, load: Load, prompts: Sequence[str]) -> Passage:
    """Send a load; tell requests a second and the median time to the first token."""
    begun = time.perf_counter()

    def ask(row: int) -> tuple[float, float]:
        due = begun + load.arrivals[row]
        time.sleep(max(0.0, due - time.perf_counter()))
        first = 0.0
        for piece in client.stream(
            model,
            prompts[row],
            max_tokens=load.lengths[row],
            ignore_eos=True,
            timeout=PATIENCE,
        ):
            first = first or (time.perf_counter() if piece.text else 0.0)
        return first - due, time.perf_counter()

    with ThreadPoolExecutor(len(load.lengths)) as pool:
        ends = list(pool.map(ask, range(len(load.lengths))))
    seconds = max(end for _, end in ends) - begun
    return Passage(len(ends) / seconds, median(first for first, _ in ends))
