"""The driver without Triton: requests come, are given back, are cancelled, in any order."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.runtime import Progress
from llmserve.testing import ByteTokenizer

from .scheduler import Clock, Scheduler


def test_the_first_piece_does_not_wait_for_the_end_of_the_burst() -> None:
    triton = Scheduler(burst_ms=50)
    request = triton.send("ab", max_tokens=8, stream=True)
    triton.run([request])
    assert request.responses[0].texts == ["a"]


@pytest.mark.parametrize(
    ("number", "flags"),
    [(77_777_777, 1), (2, 3), ("abc", 1), (1, 1)],
    ids=["number", "end", "text", "in use"],
)
def test_a_sequence_id_of_the_clients_own_is_refused(number: Any, flags: int) -> None:
    triton = Scheduler()
    stays = triton.send("ab", max_tokens=9)
    triton.run([stays])
    own = triton.send("cd", number=number if isinstance(number, int) else 5, flags=flags)
    if isinstance(number, str):
        own.sequence = number
    triton.run([own])
    triton.run_all()
    assert "sequence id" in (own.error or "")
    assert stays.text == "ababababa"
    assert triton.nothing_is_left()


def test_a_request_that_fails_does_so_alone() -> None:
    triton = Scheduler()
    good, breaks, refused = triton.send("ab"), triton.send("!"), triton.send("?")
    wrong = triton.send("ab", max_tokens=0)
    triton.run_all()
    assert good.text == "abababab"
    assert breaks.error == "the model failed: ValueError: cannot go on"
    assert refused.error == "no questions"
    assert "max_tokens" in (wrong.error or "")
    assert triton.nothing_is_left()


@pytest.mark.parametrize(("word", "kind"), [("#", "MemoryError: no"), ("~", "RuntimeError: ")])
def test_a_step_that_fails_answers_who_is_under_way_and_the_next_can_come(
    word: str, kind: str
) -> None:
    triton = Scheduler()
    beside = triton.send("ab", max_tokens=9)
    triton.run([beside])
    breaks = triton.send(word)
    triton.run_all()
    assert all(
        (one.error or "").startswith(f"the model failed: {kind}") for one in (beside, breaks)
    )
    assert triton.nothing_is_left()
    after = triton.send("ab")
    triton.run_all()
    assert after.text == "abababab"


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_cannot_be_told_fails_alone(stream: bool) -> None:
    triton = Scheduler()
    good = triton.send("ab")
    breaks = triton.send("picky", max_tokens=20, stream=stream)
    triton.run_all()
    assert good.text == "abababab"
    assert breaks.error == "the model failed: KeyError: 'picky'"
    assert triton.nothing_is_left()


def test_a_client_that_goes_frees_its_place_at_once() -> None:
    triton = Scheduler()
    gone, stays = triton.send("ab", max_tokens=900), triton.send("cd", max_tokens=4)
    triton.run([gone, stays])
    gone.cancelled = True
    triton.run([gone, stays])
    assert gone not in triton.queue
    assert not gone.responses, "an answer would keep Triton from freeing the sequence's place"
    assert triton.engine.live <= 1
    triton.run_all()
    assert stays.text == "cdcd"
    assert triton.nothing_is_left()


def test_the_figures_are_those_of_what_happened() -> None:
    triton = Scheduler()
    triton.send("abc", max_tokens=4)
    triton.send("de", max_tokens=6, stream=True)
    triton.run_all()
    found = {name: family.metric.value for name, family in triton.driver._metrics.families.items()}
    assert found["llmserve_input_tokens_total"] == 5
    assert found["llmserve_output_tokens_total"] == 10
    assert found["llmserve_first_token_seconds_count"] == 2
    assert found["llmserve_token_seconds_count"] == 8
    assert found["llmserve_running_sequences"] == found["llmserve_cache_used_tokens"] == 0
    assert found["llmserve_cache_tokens"] == 1000


def test_unloading_lets_go_of_everything_that_is_tritons() -> None:
    """Metrics that outlive the server's memory crash the process when it ends."""
    triton = Scheduler()
    triton.run([triton.send("ab", max_tokens=900)])
    triton.driver.finalize()
    assert triton.nothing_is_left()
    assert not triton.driver._metrics.families


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["ab", "cde", "!", "?", "ü"]), st.integers(0, 12), st.booleans()),
        max_size=10,
    ),
    st.randoms(use_true_random=False),
)
def test_any_order_of_arrivals_batches_and_cancellations(
    asked: list[tuple[str, int, bool]], chance: random.Random
) -> None:
    # What the driver does with requests that it has not seen for a while depends on time.
    clock = Clock()
    triton, requests = Scheduler(clock=clock), []
    waiting = list(asked)
    while waiting or triton.queue:
        if waiting and (not triton.queue or chance.random() < 0.5):
            text, length, stream = waiting.pop()
            requests.append((text, length, triton.send(text, max_tokens=length, stream=stream)))
            continue
        if chance.random() < 0.05:
            chance.choice(triton.queue).cancelled = True
        if chance.random() < 0.1:
            clock.pass_by(chance.choice([0.01, 0.1, 2.0]))
        triton.run(chance.sample(triton.queue, chance.randint(1, len(triton.queue))))
    assert triton.nothing_is_left()
    for text, length, request in requests:
        assert request.closed or request.cancelled
        if length and not request.cancelled and text not in "!?":
            expected = (text.encode() * length)[:length]
            assert request.text == ByteTokenizer().decode(list(expected))


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
    assert triton.driver._metrics.families["llmserve_running_sequences"].metric.value == 0
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
