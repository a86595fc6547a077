"""How long bursts are, by what lies between them."""

from __future__ import annotations

import pytest

from llmserve_iterative.burst import Burst

SHORTEST = 0.008
LONGEST = 0.1


def fly(burst: Burst, requests: int, *, came: int = 0, cost: float, now: float) -> float:
    """Make a burst that costs so much beside its steps; return when it is over."""
    burst.begin(now + cost / 2, came, requests)
    end = now + cost + burst.length
    burst.end(end, burst.length)
    return end


@pytest.fixture
def busy() -> tuple[Burst, float]:
    """A driver that has had 32 requests for a while, at 7 ms a burst."""
    burst, now = Burst(SHORTEST), 0.0
    for turn in range(40):
        now = fly(burst, 32, came=0 if turn else 32, cost=0.007, now=now)
    return burst, now


def test_bursts_grow_in_calm_and_are_short_when_somebody_comes(busy: tuple[Burst, float]) -> None:
    burst, now = busy
    assert burst.length == pytest.approx(LONGEST)
    fly(burst, 33, came=1, cost=0.007, now=now)
    assert burst.length < 0.05


def test_what_many_cost_keeps_nobody_waiting_for_one(busy: tuple[Burst, float]) -> None:
    burst, now = busy
    for turn in range(5):
        now = fly(burst, 1, came=0 if turn else 1, cost=0.0005, now=now)
        assert burst.length <= 1.5 * SHORTEST
