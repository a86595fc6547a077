"""Requests that do not come back: who leaves while waiting, and whose steps take too long."""

from __future__ import annotations

import threading
import time

import pytest

from .scheduler import Scheduler


def test_a_request_that_is_never_scheduled_again_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = Scheduler()
    triton.run([lost := triton.send("ab", max_tokens=900)])
    triton.queue.remove(lost)
    monkeypatch.setattr("llmserve_iterative.driver._ABANDONED", 0.0)
    other = triton.send("cd", max_tokens=3)
    triton.run_all()
    assert other.text == "cdc"
    assert triton.nothing_is_left()


def test_who_is_passed_by_in_the_queue_frees_its_place() -> None:
    """Triton drops a request whose client leaves while it waits, and tells nobody."""
    triton = Scheduler()
    lost, other = triton.send("ab", max_tokens=900), triton.send("cd", max_tokens=900)
    triton.run([lost, other])
    triton.queue.remove(lost)
    triton.run([other])
    assert triton.engine.live == 2, "it may have been just behind"
    triton.run([other])
    assert triton.engine.live == 1


def test_who_is_not_seen_while_nothing_comes_frees_its_place() -> None:
    triton, threads = Scheduler(), threading.active_count()
    triton.run([lost := triton.send("ab", max_tokens=900)])
    triton.queue.remove(lost)
    deadline = time.monotonic() + 10
    while triton.engine.live:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert triton.driver._metrics.families["running_sequences"].metric.value == 0
    triton.driver.finalize()
    assert threading.active_count() <= threads


def test_who_was_given_up_and_comes_all_the_same_goes_on() -> None:
    triton = Scheduler()
    late, other = triton.send("abc", max_tokens=7), triton.send("cd", max_tokens=900)
    triton.run([late, other])
    triton.run([other])
    triton.run([other])
    assert triton.engine.live == 1
    triton.run([late, other])
    other.cancelled = True
    triton.run_all()
    assert late.text == "abcabca"
    assert triton.nothing_is_left()


def test_a_request_that_triton_would_lose_is_kept_to_its_end() -> None:
    """Given back after the idle time, it would never be answered."""
    triton = Scheduler(idle_seconds=0.05)
    triton.engine.pause = 0.02
    request = triton.send("ab", max_tokens=12, stream=True)
    triton.run([request])
    assert not request.closed
    time.sleep(0.05)
    triton.run([request])
    assert request.closed
    assert request.text == "ab" * 6


def test_short_requests_in_a_row_do_not_make_a_long_one_look_late() -> None:
    """None of them comes twice, so none would show how short the queue is."""
    triton = Scheduler(burst_ms=200, idle_seconds=0.4)
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        triton.send("ab", max_tokens=3)
        triton.run_all()
    long = triton.send("ab", max_tokens=900, stream=True)
    triton.driver._shortest_turn = 0.001
    triton.driver._turns_alone = -1
    triton.engine.pause = 0.001
    triton.run([long])
    assert not long.closed
