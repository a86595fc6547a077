"""For how long steps follow one another before new requests can join."""

from __future__ import annotations

import pytest

from .scheduler import Clock, Progress, Scheduler


@pytest.mark.parametrize("requests", [1, 32])
def test_turns_grow_in_calm_and_are_short_when_somebody_comes(requests: int) -> None:
    clock = Clock()
    triton = Scheduler(burst_ms=8, clock=clock)
    # A step takes a millisecond, and its tokens tell how long a turn was.
    step = triton.engine.step

    def slow_step() -> Progress:
        clock.pass_by(0.001)
        return step()

    triton.engine.step = slow_step  # type: ignore[method-assign]
    for _ in range(requests):
        triton.send("ab", max_tokens=900)
    turns: list[int] = []
    before = 0
    for _ in range(8):
        triton.run(list(triton.queue))
        made = _tokens(triton)
        turns.append(made - before)
        before = made
    assert turns == sorted(turns)
    # What many cost keeps nobody waiting for one.
    assert turns[-1] <= 9 if requests == 1 else turns[-1] >= 90
    triton.send("ab", max_tokens=900)
    triton.run(list(triton.queue))
    assert _tokens(triton) - before <= 41
    triton.driver.finalize()


def _tokens(triton: Scheduler) -> int:
    return len(triton.engine.under_way[0].token_ids)
