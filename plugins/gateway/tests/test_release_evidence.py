"""The test that judges a release errs as seldom as it says, and does not take long."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve_gateway.releases.evidence import Evidence, Tolerance, Verdict, joint_verdict

ALLOWED, FAULT = 0.01, 0.05
RUNS = 200
MOST = 700
"""Requests within which a fault is to be found, and a build that is fine to be promoted."""


def run(new: float, old: float, seed: int, requests: int = MOST) -> tuple[Verdict, int]:
    """Return the first verdict of a simulated release, and after how many requests it came."""
    evidence, chance = Evidence(Tolerance(ALLOWED, FAULT)), random.Random(seed)
    for number in range(1, requests + 1):
        verdict = evidence.add(chance.random() < new, chance.random() < old)
        if verdict != "undecided":
            return verdict, number
    return "undecided", requests


def verdicts(new: float, old: float, requests: int = MOST) -> list[Verdict]:
    return [run(new, old, seed, requests)[0] for seed in range(RUNS)]


def highest(expected: float) -> float:
    """Return what the share of all runs is seldom above (four standard deviations)."""
    return RUNS * expected + 4 * math.sqrt(RUNS * expected * (1 - expected))


@pytest.mark.parametrize(("new", "old"), [(0.01, 0.0), (0.21, 0.2)])
def test_a_build_within_what_is_allowed_is_seldom_returned(new: float, old: float) -> None:
    # Far more looks than any release has: the chance is that of ever being returned.
    assert verdicts(new, old, 1000).count("worse") <= highest(0.01)


@pytest.mark.parametrize(("new", "old"), [(0.05, 0.0), (0.25, 0.2)])
def test_a_build_with_the_fault_is_seldom_promoted(new: float, old: float) -> None:
    assert verdicts(new, old, 1000).count("fine") <= highest(0.05)


@pytest.mark.parametrize(("new", "old", "power"), [(0.05, 0.0, 0.95), (0.1, 0.02, 0.95), (1, 0, 1)])
def test_a_fault_is_found_within_so_many_requests(new: float, old: float, power: float) -> None:
    assert verdicts(new, old).count("worse") >= RUNS * power


@pytest.mark.parametrize(("new", "old"), [(0.0, 0.0), (0.005, 0.005)])
def test_a_build_that_is_as_good_is_promoted_within_so_many_requests(
    new: float, old: float
) -> None:
    assert verdicts(new, old).count("fine") >= RUNS * 0.95


def test_a_build_that_always_fails_is_returned_at_once() -> None:
    assert run(1, 0, 0)[1] <= 12


def test_rates_that_change_with_the_hour_return_nothing_by_themselves() -> None:
    """Both builds fail one request in two for a while: neither is to blame."""
    returned = 0
    for seed in range(RUNS):
        evidence, chance = Evidence(Tolerance(ALLOWED, FAULT)), random.Random(seed)
        for number in range(600):
            rate = 0.5 if number // 100 % 2 else 0.0
            verdict = evidence.add(chance.random() < rate, chance.random() < rate)
            returned += number == 599 and verdict == "worse"
    assert returned <= highest(0.01)


pairs = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=300)


@given(pairs)
def test_what_was_worse_stays_worse(failures: list[tuple[bool, bool]]) -> None:
    evidence, was_worse = Evidence(Tolerance(ALLOWED, FAULT)), False
    for new, old in failures:
        verdict = evidence.add(new, old)
        assert verdict == "worse" or not was_worse
        was_worse = verdict == "worse"


@given(pairs, st.integers(0, 299))
def test_one_more_failure_of_the_new_build_never_speaks_for_it(
    failures: list[tuple[bool, bool]], at: int
) -> None:
    before, after = Evidence(Tolerance(ALLOWED, FAULT)), Evidence(Tolerance(ALLOWED, FAULT))
    for number, (new, old) in enumerate(failures):
        before.add(new, old)
        after.add(new or number == at, old)
    assert after.chance_if_fine <= before.chance_if_fine + 1e-12
    assert after.chance_if_faulty >= before.chance_if_faulty - 1e-12


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=6), st.data())
def test_a_bet_is_fair(values: list[float], data: st.DataObject) -> None:
    """Whatever was seen, a next observation with the mean that is allowed wins nothing."""
    tolerance = Tolerance(data.draw(st.sampled_from([0.0, 0.01, 0.2])), 0.5)

    def stake(then: float) -> float:
        evidence = Evidence(tolerance)
        for value in (*values, then):
            evidence.add(max(value, 0), max(-value, 0))
        return math.exp(evidence._worse.log)

    now = Evidence(tolerance)
    for value in values:
        now.add(max(value, 0), max(-value, 0))
    high = data.draw(st.floats(tolerance.allowed, 1))
    # 1 with this chance and 0, or -1, otherwise.
    for low in (0.0, -1.0):
        chance = (tolerance.allowed - low) / (1 - low)
        expected = chance * stake(1.0) + (1 - chance) * stake(low)
        assert expected == pytest.approx(math.exp(now._worse.log), rel=1e-9)
    assert stake(high) >= math.exp(now._worse.log) - 1e-9


def test_one_that_is_worse_is_enough_and_all_have_to_be_fine() -> None:
    worse, fine, none = (Evidence(Tolerance(ALLOWED, FAULT)) for _ in range(3))
    for _ in range(300):
        worse.add(1, 0)
        fine.add(0, 0)
    assert joint_verdict([worse, fine, none]) == "worse"
    assert joint_verdict([fine, none]) == "undecided"
    assert joint_verdict([fine, fine]) == "fine"
    assert joint_verdict([]) == "undecided"


@pytest.mark.parametrize(("allowed", "fault"), [(0.05, 0.05), (-0.1, 0.2), (0.1, 1.1)])
def test_a_tolerance_makes_sense(allowed: float, fault: float) -> None:
    with pytest.raises(ValueError, match="more than what is allowed"):
        Tolerance(allowed, fault)
