"""When requests arrive under a rate."""

from __future__ import annotations

import random

KINDS = ("poisson", "constant")


def arrival_times(
    kind: str, rate: float, seed: int, *, count: int | None, duration: float | None
) -> list[float]:
    """Give arrival times in seconds, so many or until so long; the same seed gives the same.

    Poisson arrivals come independently of one another, as those of many users do: at times
    several at once, at times none for long.

    >>> arrival_times("constant", 4.0, 0, count=3, duration=None)
    [0.0, 0.25, 0.5]
    """
    draw = random.Random(f"arrivals {seed}")  # noqa: S311
    times: list[float] = []
    at = 0.0
    while (count is None or len(times) < count) and (duration is None or at < duration):
        times.append(at)
        # Of the arrivals so far, not of the last one: small errors must not add up.
        at = len(times) / rate if kind == "constant" else at + draw.expovariate(rate)
    return times
