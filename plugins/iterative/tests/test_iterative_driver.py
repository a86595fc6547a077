"""The driver without Triton: requests arrive, are returned and are cancelled, in any order."""

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
from llmserve.testing.echoes import SlowFormatter

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
def test_a_clients_own_sequence_id_is_refused(number: Any, flags: int) -> None:
    triton = Scheduler()
    running = triton.send("ab", max_tokens=9)
    triton.run([running])
    refused = triton.send("cd", number=number if isinstance(number, int) else 5, flags=flags)
    if isinstance(number, str):
        refused.sequence = number
    triton.run([refused])
    triton.run_all()
    assert "sequence id" in (refused.error or "")
    assert running.text == "ababababa"
    assert triton.nothing_is_left()


def test_a_request_that_fails_does_so_alone() -> None:
    triton = Scheduler()
    good, failing, refused = triton.send("ab"), triton.send("!"), triton.send("?")
    invalid = triton.send("ab", max_tokens=0)
    triton.run_all()
    assert good.text == "abababab"
    assert (failing.error or "").startswith("the model failed: ValueError: cannot go on")
    assert refused.error == "no questions"
    assert "max_tokens" in (invalid.error or "")
    assert triton.nothing_is_left()


def test_steps_do_not_wait_for_a_constraint_to_be_compiled() -> None:
    formatter = SlowFormatter()
    triton = Scheduler(formatter=formatter)
    slow, bomb = triton.send("slow", max_tokens=5), triton.send("bomb")
    other, gone = triton.send("ab"), triton.send("bomb")
    while not other.closed:
        triton.run(list(triton.queue))
    assert other.text == "abababab"
    assert not slow.closed
    assert not bomb.closed
    gone.cancelled = True
    triton.run(list(triton.queue))
    assert gone not in triton.queue
    formatter.compiled.set()
    triton.run_all()
    assert slow.text == "slows"
    assert bomb.error == "compiling it takes too long"
    assert triton.nothing_is_left()


def test_a_request_that_fails_while_triton_has_it_gets_the_error_when_it_comes_back() -> None:
    triton = Scheduler()
    other, failing = triton.send("ab", max_tokens=9), triton.send("!")
    for present in ([other, failing], [other, failing], [other]):
        # The engine computes the last step for both, though only one of them is here.
        triton.run(present)
    triton.run_all()
    assert (failing.error or "").startswith("the model failed: ValueError: cannot go on")
    assert other.text == "ababababa"
    assert triton.nothing_is_left()


@pytest.mark.parametrize(("word", "kind"), [("#", "MemoryError: no"), ("~", "RuntimeError: ")])
def test_a_failed_step_answers_all_requests_in_flight_and_the_next_can_come(
    word: str, kind: str
) -> None:
    triton = Scheduler()
    running = triton.send("ab", max_tokens=9)
    triton.run([running])
    failing = triton.send(word)
    triton.run_all()
    for request in (running, failing):
        assert (request.error or "").startswith(f"the model failed: {kind}")
    assert triton.nothing_is_left()
    later = triton.send("ab")
    triton.run_all()
    assert later.text == "abababab"


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_cannot_be_formatted_fails_alone(stream: bool) -> None:
    triton = Scheduler()
    good = triton.send("ab")
    failing = triton.send("picky", max_tokens=20, stream=stream)
    triton.run_all()
    assert good.text == "abababab"
    assert (failing.error or "").startswith("the model failed: KeyError: 'picky'")
    assert triton.nothing_is_left()


def test_a_disconnected_client_frees_its_slot_at_once() -> None:
    triton = Scheduler()
    cancelled, other = triton.send("ab", max_tokens=900), triton.send("cd", max_tokens=4)
    triton.run([cancelled, other])
    cancelled.cancelled = True
    triton.run([cancelled, other])
    assert cancelled not in triton.queue
    assert not cancelled.responses, "a response would keep Triton from freeing the sequence's slot"
    assert triton.engine.live <= 1
    triton.run_all()
    assert other.text == "cdcd"
    assert triton.nothing_is_left()


def test_the_metrics_are_correct() -> None:
    triton = Scheduler()
    triton.send("abc", max_tokens=4)
    triton.send("de", max_tokens=6, stream=True)
    triton.run_all()
    families = triton.driver._runner.metrics.families
    values = {name: family.metric.value for name, family in families.items()}
    assert values["llmserve_input_tokens_total"] == 5
    assert values["llmserve_output_tokens_total"] == 10
    assert values["llmserve_first_token_seconds_count"] == 2
    assert values["llmserve_token_seconds_count"] == 8
    assert values["llmserve_running_sequences"] == values["llmserve_cache_used_tokens"] == 0
    assert values["llmserve_cache_tokens"] == 1000


def test_unloading_releases_everything_of_tritons() -> None:
    """Metrics that outlive the server's memory crash the process when it ends."""
    triton = Scheduler()
    triton.run([triton.send("ab", max_tokens=900)])
    triton.driver.finalize()
    assert triton.nothing_is_left()
    assert not triton.driver._runner.metrics.families


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["ab", "cde", "!", "?", "ü"]), st.integers(0, 12), st.booleans()),
        max_size=10,
    ),
    st.randoms(use_true_random=False),
)
def test_any_order_of_arrivals_batches_and_cancellations(
    arrivals: list[tuple[str, int, bool]], rng: random.Random
) -> None:
    # How the driver treats requests that it has not seen for a while depends on time.
    clock = Clock()
    triton, sent = Scheduler(clock=clock), []
    waiting = list(arrivals)
    while waiting or triton.queue:
        if waiting and (not triton.queue or rng.random() < 0.5):
            text, length, stream = waiting.pop()
            sent.append((text, length, triton.send(text, max_tokens=length, stream=stream)))
            continue
        if rng.random() < 0.05:
            rng.choice(triton.queue).cancelled = True
        if rng.random() < 0.1:
            clock.advance(rng.choice([0.01, 0.1, 2.0]))
        triton.run(rng.sample(triton.queue, rng.randint(1, len(triton.queue))))
    assert triton.nothing_is_left()
    for text, length, request in sent:
        assert request.closed or request.cancelled
        if length and not request.cancelled and text not in "!?":
            expected = (text.encode() * length)[:length]
            assert request.text == ByteTokenizer().decode(list(expected))


def test_a_request_that_others_overtake_in_the_queue_frees_its_slot() -> None:
    """Triton silently drops a request whose client disconnects while the request waits."""
    triton = Scheduler()
    dropped, other = triton.send("ab", max_tokens=900), triton.send("cd", max_tokens=900)
    triton.run([dropped, other])
    triton.queue.remove(dropped)
    triton.run([other])
    assert triton.engine.live == 2, "it may have been the next in the queue"
    triton.run([other])
    assert triton.engine.live == 1


def test_a_request_that_is_not_seen_while_none_arrives_frees_its_slot() -> None:
    triton, threads = Scheduler(), threading.active_count()
    triton.run([dropped := triton.send("ab", max_tokens=900)])
    triton.queue.remove(dropped)
    deadline = time.monotonic() + 10
    while triton.engine.live:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert triton.driver._runner.metrics.families["llmserve_running_sequences"].metric.value == 0
    triton.driver.finalize()
    assert threading.active_count() <= threads


def test_a_suspended_request_that_comes_back_continues() -> None:
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


def test_a_request_that_triton_would_lose_runs_to_completion() -> None:
    """If it were returned after the idle time, it would never be answered."""
    clock = Clock()
    triton = Scheduler(idle_seconds=0.05, clock=clock)
    request = triton.send("ab", max_tokens=12, stream=True)
    triton.run([request])
    assert not request.closed
    clock.advance(0.05)
    triton.run([request])
    assert request.closed
    assert request.text == "ab" * 6


@pytest.mark.parametrize("requests", [1, 32])
def test_bursts_grow_when_no_request_arrives_and_are_short_otherwise(requests: int) -> None:
    clock = Clock()
    triton = Scheduler(burst_ms=8, clock=clock)
    # A step takes a millisecond, so the number of tokens shows how long a burst was.
    step = triton.engine.step

    def slow_step() -> Progress:
        clock.advance(0.001)
        return step()

    triton.engine.step = slow_step  # type: ignore[method-assign]
    for _ in range(requests):
        triton.send("ab", max_tokens=900)
    bursts: list[int] = []
    before = 0
    for _ in range(8):
        triton.run(list(triton.queue))
        tokens = _tokens(triton)
        bursts.append(tokens - before)
        before = tokens
    assert bursts == sorted(bursts)
    # A single request costs little to return, so its bursts stay short.
    assert bursts[-1] <= 9 if requests == 1 else bursts[-1] >= 90
    triton.send("ab", max_tokens=900)
    triton.run(list(triton.queue))
    assert _tokens(triton) - before <= 41
    triton.driver.finalize()


def _tokens(triton: Scheduler) -> int:
    return len(triton.engine.running[0].token_ids)
