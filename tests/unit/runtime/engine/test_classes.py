"""Classes in the engine: a class above goes first and interrupts others, and nobody starves."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.contract.classes import LATE_AFTER, LATE_EVERY
from llmserve.runtime import Engine, Generation
from llmserve.runtime.engine.places import MOST_INTERRUPTIONS
from llmserve.testing import ByteTokenizer
from llmserve.testing.fake import generation
from tests.recall import RecallingRunner, RecallRunner

ABOVE, USUAL, BELOW = -5, 0, 1001


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def engine_of(
    places: int, *, pages: int = 64, runner: RecallRunner | None = None, **settings: Any
) -> tuple[Engine, Clock]:
    clock = Clock()
    runner = runner or RecallRunner(pages)
    made = Engine(runner, ByteTokenizer(), max_sequences=places, clock=clock, **settings)
    return made, clock


def asked(engine: Engine, number: int, prompt: int = 3, length: int = 4) -> Generation:
    ids = [(number + prompt) % 10] * prompt
    engine.admit(answer := generation(ids, length, priority_class=number))
    return answer


def ends(engine: Engine, answers: dict[str, Generation]) -> list[str]:
    """Return the names of answers in the order of their ends."""
    found: list[str] = []
    while engine.busy:
        assert not engine.step().failed
        found += [name for name, each in answers.items() if each.done and name not in found]
    return found


def alone(number: int, prompt: int = 3, length: int = 4) -> list[int]:
    engine, _ = engine_of(1)
    answer = asked(engine, number, prompt, length)
    ends(engine, {})
    return answer.token_ids


def test_a_class_above_goes_first_and_within_a_class_who_came_first() -> None:
    engine, _ = engine_of(1)
    numbers = {"a": USUAL, "b": BELOW, "c": USUAL, "d": ABOVE, "e": BELOW, "f": ABOVE}
    answers = {name: asked(engine, number) for name, number in numbers.items()}
    assert ends(engine, answers) == ["d", "f", "a", "c", "b", "e"]


def test_a_class_above_interrupts_and_who_was_goes_on_where_it_was() -> None:
    engine, _ = engine_of(2)
    answers = {str(n): asked(engine, BELOW, 5 + n, 9) for n in range(2)}
    for _ in range(4):
        engine.step()
    had = len(answers["1"].token_ids)
    assert had > 1
    answers["above"] = asked(engine, USUAL)
    engine.step()
    # Who came last makes room.
    assert (engine.live, engine.waiting, len(answers["1"].token_ids)) == (2, 1, had)
    assert ends(engine, answers)[0] == "above"
    for n in range(2):
        assert answers[str(n)].token_ids == alone(BELOW, 5 + n, 9)


def test_who_needs_pages_takes_those_of_classes_below_alone() -> None:
    engine, _ = engine_of(4, pages=6)
    answers = {"below": asked(engine, BELOW, 8, 6), "same": asked(engine, USUAL, 5, 6)}
    engine.step()
    answers["large"] = asked(engine, USUAL, 16, 2)
    engine.step()
    assert (engine.live, engine.waiting) == (1, 2)
    assert ends(engine, answers) == ["same", "large", "below"]


def test_a_prompt_of_a_class_above_is_read_first() -> None:
    engine, _ = engine_of(4, prefill_chunk=4)
    below = asked(engine, BELOW, 40)
    engine.step()
    above = asked(engine, USUAL, 8, 2)
    for _ in range(4):
        engine.step()
    assert above.done
    assert not below.token_ids


def test_one_turn_in_eight_is_of_who_has_waited_too_long() -> None:
    engine, clock = engine_of(1)
    late = [asked(engine, BELOW, length=1) for _ in range(3)]
    clock.now = LATE_AFTER
    others = [asked(engine, USUAL, length=1) for _ in range(40)]
    order: list[int] = []
    while engine.busy:
        engine.step()
        answers = enumerate([*late, *others])
        order += [n for n, each in answers if each.done and n not in order]
    assert [order.index(n) for n in range(3)] == [0, LATE_EVERY, 2 * LATE_EVERY]


def test_who_was_interrupted_often_is_interrupted_no_more() -> None:
    engine, clock = engine_of(1)
    below = asked(engine, BELOW, length=30)
    for _ in range(MOST_INTERRUPTIONS):
        engine.step()
        above = asked(engine, USUAL, length=2)
        for _ in range(2):
            engine.step()
        assert above.done
    last = [asked(engine, USUAL, length=2) for _ in range(LATE_EVERY)]
    while not below.done:
        engine.step()
        clock.now += 0.01
    assert not any(each.done for each in last)


def test_a_prompt_that_is_never_read_keeps_its_place() -> None:
    engine, clock = engine_of(4, prefill_chunk=4)
    below = asked(engine, BELOW, 12, 1)
    while not below.done:
        asked(engine, USUAL, 8, 1)
        engine.step()
        clock.now += 1
        assert clock.now < LATE_AFTER + 8
    assert clock.now > LATE_AFTER


requests = st.fixed_dictionaries(
    {
        "class": st.sampled_from([-2, 0, 0, 3, BELOW]),
        "prompt": st.integers(1, 14),
        "length": st.integers(1, 8),
        "after": st.integers(0, 6),
    }
)


@settings(max_examples=25, deadline=None)
@given(
    arrivals=st.lists(requests, min_size=1, max_size=14),
    places=st.integers(1, 9),
    pages=st.sampled_from([6, 9, 40]),
    seconds=st.sampled_from([0.01, 4.0, 40.0]),
    prefill_chunk=st.sampled_from([1, 4, 64]),
    has_states=st.booleans(),
)
def test_any_mix_of_classes_gives_the_answers_that_each_gets_alone(
    arrivals: list[dict[str, int]],
    places: int,
    pages: int,
    seconds: float,
    prefill_chunk: int,
    has_states: bool,
) -> None:
    runner = RecallingRunner(pages, most_copies=3) if has_states else RecallRunner(pages)
    engine, clock = engine_of(places, runner=runner, prefill_chunk=prefill_chunk)
    answers = []
    steps = 0
    for each in arrivals:
        answers.append(asked(engine, each["class"], each["prompt"], each["length"]))
        for _ in range(each["after"]):
            assert not engine.step().failed
            clock.now += seconds
    while engine.busy:
        assert not engine.step().failed
        clock.now += seconds
        steps += 1
        assert steps < 5000, "the engine does not finish"
    assert engine.cache_used == 0
    for each, answer in zip(arrivals, answers, strict=True):
        assert answer.token_ids == alone(each["class"], each["prompt"], each["length"])


@settings(max_examples=12, deadline=None)
@given(
    places=st.integers(1, 17),
    below=st.integers(1, 4),
    length=st.integers(1, 12),
    others=st.lists(st.integers(1, 6), min_size=1, max_size=7),
)
def test_nobody_starves_while_a_class_above_always_has_more(
    places: int, below: int, length: int, others: list[int]
) -> None:
    """Each of those below ends within its own time and the turns of those before it."""
    engine, clock = engine_of(places, pages=400)
    late = [asked(engine, BELOW, length=length) for _ in range(below)]
    lengths, flood = deque(others), deque[Generation]()
    # Of each that waits, once it is late: seven turns of others, and the time of its own answer.
    longest = max(others)
    bound = LATE_AFTER + below * (LATE_EVERY * longest + (MOST_INTERRUPTIONS + 2) * (length + 1))
    while not all(each.done for each in late):
        while len(flood) < 2 * places:
            flood.append(asked(engine, USUAL, length=lengths[0]))
            lengths.rotate()
        assert not engine.step().failed
        clock.now += 1
        flood = deque(each for each in flood if not each.done)
        assert clock.now <= bound, "one starves"


@pytest.mark.parametrize(("places", "pages"), [(1, 64), (4, 8)])
def test_one_below_is_not_interrupted_again_and_again_by_one_at_a_time(
    places: int, pages: int
) -> None:
    """Each time that it goes on, the next comes before it has got anywhere: for its place, or, in
    a small cache, for its pages."""
    engine, clock = engine_of(places, pages=pages, prefill_chunk=1, share_prefixes=False)
    below = asked(engine, BELOW, 20, 2)
    above: Generation | None = None
    since = 0
    while not below.done:
        if above is None or above.done:
            since += 1
        if since > 3:
            above, since = asked(engine, USUAL, 4, 25), 0
        assert not engine.step().failed
        clock.now += 0.01
        assert clock.now < 10, "one starves"
