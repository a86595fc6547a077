"""The requests of a run, decided before it starts: the same seed gives the same requests."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmserve.errors import UsageError
from llmserve_bench.prompts import Prompts, TokenCounter
from llmserve_bench.results import Load

_MOST_REQUESTS = 10_000_000
DISTINCT = 256
"""Synthetic prompts made for a duration; after that many they repeat."""


@dataclass(frozen=True)
class Request:
    """A request to send; ``due`` is when, in seconds from the start, under a rate."""

    index: int
    prompt: str
    options: Mapping[str, Any]
    due: float | None = None


def arrival_times(load: Load) -> list[float]:
    """Give arrival times in seconds, for as many requests or as long as the load says."""
    rate, count, duration = load.rate or 1.0, load.requests, load.duration
    if count is None and rate * (duration or 0.0) > _MOST_REQUESTS:
        problem = f"{rate:g} a second for {duration:g} s are more than {_MOST_REQUESTS:,} requests"
        raise UsageError(problem, mend="lower the rate or the duration")
    draw = random.Random(f"arrivals {load.seed}")  # noqa: S311
    times: list[float] = []
    at = 0.0
    while (count is None or len(times) < count) and (duration is None or at < duration):
        times.append(at)
        # From the count and not from the last time, so that rounding errors do not add up.
        at = len(times) / rate if load.arrivals == "constant" else at + draw.expovariate(rate)
    return times


def make_schedule(
    load: Load, prompts: Prompts, counter: TokenCounter, *, ignore_eos: bool
) -> tuple[list[Request], list[Request]]:
    """Give the requests of the warm-up and those of the run.

    With ``ignore_eos`` answers of a given length go on past the model's own end of text, so that
    they really have that length.
    """
    times = arrival_times(load) if load.rate is not None else None
    count = load.requests if times is None else len(times)
    draw = random.Random(f"prompts {load.seed}")  # noqa: S311
    samples = prompts.samples(counter, count or DISTINCT, draw)

    def request(at: int, due: float | None = None) -> Request:
        sample = samples[at % len(samples)]
        length = prompts.output_length(sample, counter, draw)
        options: dict[str, Any] = {} if length is None else {"max_tokens": length}
        if length is not None and ignore_eos:
            options["ignore_eos"] = True
        return Request(at, sample.text, {**options, **load.options}, due)

    total = len(samples) if count is None else count
    requests = [request(at, times[at] if times else None) for at in range(total)]
    if prompts.dataset is None:
        # Other words than in the run: a server may keep what it has read of a prompt.
        samples = prompts.samples(counter, load.warmup, draw)
    return [request(at) for at in range(load.warmup)], requests
