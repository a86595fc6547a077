"""What a thing that is watched goes through, by a clock of the test's."""

from __future__ import annotations

import pytest

from llmserve.server.states import State, Watch


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def watch(told: list[str]) -> Watch:
    made = Watch("demo", lambda line: told.append(line.removeprefix("demo: ")))
    made.loaded(0.0)
    return made


def test_it_starts_again_after_its_process_has_died(watch: Watch, told: list[str]) -> None:
    watch.died(10.0, "its process has died")
    assert (watch.state, watch.again_at) == (State.RESTARTING, 10.5)
    watch.loading(10.5)
    watch.loaded(12.0)
    assert (watch.alive, watch.restarts, watch.since) == (True, 1, 12.0)
    assert told == [
        "ready",
        "restarting (its process has died)",
        "loading (its process has died)",
        "ready",
    ]


def test_one_canary_without_an_answer_makes_it_suspect_and_two_in_a_row_dead(
    watch: Watch, told: list[str]
) -> None:
    watch.missed(1.0, "no answer")
    assert watch.state == State.SUSPECT
    assert watch.alive, "requests still go to it"
    watch.answered(2.0)
    watch.missed(3.0, "no answer")
    assert watch.state == State.SUSPECT
    watch.missed(4.0, "no answer")
    assert told == [
        "ready", "suspect (no answer)", "ready", "suspect (no answer)", "restarting (no answer)"
    ]  # fmt: skip


def test_each_death_waits_longer_and_the_fifth_of_a_minute_is_the_last(watch: Watch) -> None:
    waits = []
    for death in range(4):
        now = 10.0 * death
        watch.died(now, "died")
        waits.append(watch.again_at - now)
        watch.loading(now + 1)
        watch.loaded(now + 2)
    assert waits == [0.5, 1.0, 2.0, 4.0]
    watch.died(59.0, "died")
    assert (watch.state, watch.why) == (State.FAILED, "died")


def test_deaths_of_long_ago_do_not_count(watch: Watch) -> None:
    for death in range(20):
        watch.died(20.0 * death, "died")
        assert watch.state == State.RESTARTING
        watch.loading(20.0 * death + 1)
        watch.loaded(20.0 * death + 2)


def test_a_death_is_counted_once_whoever_notices_it_too(watch: Watch) -> None:
    watch.died(1.0, "its process has died")
    watch.died(1.2, "the canary says so too")
    watch.missed(1.3, "no answer")
    watch.answered(1.4)
    assert (watch.state, watch.again_at) == (State.RESTARTING, 1.5)


def test_what_goes_down_with_triton_is_not_blamed_and_what_has_failed_stays(watch: Watch) -> None:
    for moment in range(9):
        watch.waits(float(moment), "Triton ended")
        assert watch.state == State.RESTARTING
        watch.loading(moment + 0.1)
        watch.loaded(moment + 0.2)
    watch.failed(10.0, "cannot be loaded")
    watch.waits(11.0, "Triton ended")
    watch.died(12.0, "died")
    assert (watch.state, watch.why) == (State.FAILED, "cannot be loaded")


def test_who_asks_for_it_gives_a_failed_one_a_new_chance(watch: Watch, told: list[str]) -> None:
    for moment in range(5):
        watch.died(float(moment), "died")
        if watch.state is State.RESTARTING:
            watch.loading(moment + 0.1)
    assert told[-1] == "failed (died)"
    watch.asked_for(6.0)
    assert watch.state == State.LOADING
    watch.died(7.0, "died")
    assert (watch.state, watch.again_at) == (State.RESTARTING, 7.5)
