"""The states of a watched model or process, with times that the tests set."""

from __future__ import annotations

import pytest

from llmserve.contract.failures import FAILURES
from llmserve.contract.report import State
from llmserve.server.keep.states import Watch


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def watch(lines: list[str]) -> Watch:
    watch = Watch("demo", lambda line: lines.append(line.removeprefix("demo: ")))
    watch.loaded(0.0)
    return watch


def test_a_model_restarts_after_its_process_has_died(watch: Watch, lines: list[str]) -> None:
    watch.died(10.0, "its process has died")
    assert (watch.state, watch.restart_at) == (State.RESTARTING, 10.5)
    watch.loading(10.5)
    watch.loaded(12.0)
    assert (watch.alive, watch.restarts, watch.since) == (True, 1, 12.0)
    assert lines == [
        "ready",
        "restarting (its process has died)",
        "loading (its process has died)",
        "ready",
    ]


def test_one_canary_without_an_answer_makes_it_suspect_and_two_in_a_row_dead(
    watch: Watch, lines: list[str]
) -> None:
    watch.missed(1.0, "no answer")
    assert watch.state == State.SUSPECT
    assert watch.alive, "requests still go to it"
    watch.answered(2.0)
    watch.missed(3.0, "no answer")
    assert watch.state == State.SUSPECT
    watch.missed(4.0, "no answer")
    assert lines == [
        "ready", "suspect (no answer)", "ready", "suspect (no answer)", "restarting (no answer)"
    ]  # fmt: skip


def test_the_wait_grows_with_each_death_and_the_fifth_in_a_minute_is_the_last(watch: Watch) -> None:
    waits = []
    for death in range(4):
        now = 10.0 * death
        watch.died(now, "died")
        waits.append(watch.restart_at - now)
        watch.loading(now + 1)
        watch.loaded(now + 2)
    assert waits == [0.5, 1.0, 2.0, 4.0]
    watch.died(59.0, "died")
    assert (watch.state, watch.why) == (State.FAILED, "died")


def test_old_deaths_do_not_count(watch: Watch) -> None:
    for death in range(20):
        watch.died(20.0 * death, "died")
        assert watch.state == State.RESTARTING
        watch.loading(20.0 * death + 1)
        watch.loaded(20.0 * death + 2)


def test_a_death_that_is_noticed_twice_counts_once(watch: Watch) -> None:
    watch.died(1.0, "its process has died")
    watch.died(1.2, "the canary noticed it too")
    watch.missed(1.3, "no answer")
    watch.answered(1.4)
    assert (watch.state, watch.restart_at) == (State.RESTARTING, 1.5)


def test_an_end_of_triton_is_no_death_and_a_failed_model_stays_failed(watch: Watch) -> None:
    for moment in range(9):
        watch.interrupted(float(moment), "Triton ended")
        assert watch.state == State.RESTARTING
        watch.loading(moment + 0.1)
        watch.loaded(moment + 0.2)
    watch.failed(10.0, "cannot be loaded")
    watch.interrupted(11.0, "Triton ended")
    watch.died(12.0, "died")
    assert (watch.state, watch.why) == (State.FAILED, "cannot be loaded")


def test_a_request_to_load_a_failed_model_restarts_it(watch: Watch, lines: list[str]) -> None:
    for moment in range(5):
        watch.died(float(moment), "died")
        if watch.state is State.RESTARTING:
            watch.loading(moment + 0.1)
    assert lines[-1] == "failed (died)"
    watch.load_requested(6.0)
    assert watch.state == State.LOADING
    watch.died(7.0, "died")
    assert (watch.state, watch.restart_at) == (State.RESTARTING, 7.5)


def test_a_death_has_the_code_of_the_table_until_it_answers_again(watch: Watch) -> None:
    watch.loaded(0.0)
    watch.died(1.0, "its process has died")
    assert watch.report().failure is FAILURES["model_died"]
    watch.loading(2.0)
    assert watch.report().failure is FAILURES["model_died"]
    watch.loaded(3.0)
    assert watch.report().failure is None
    watch.failed(4.0, "it failed to load: no module")
    assert watch.report().failure is FAILURES["not_loaded"]


def test_what_went_wrong_is_said_in_words(watch: Watch) -> None:
    watch.loaded(0.0)
    assert not watch.went_wrong
    watch.died(1.0, "its process has died")
    assert (watch.went_wrong, watch.in_words()) == (True, "demo has ended (its process has died)")
    watch.loading(2.0)
    watch.loaded(3.0)
    assert watch.in_words() == "demo was started again"
    watch.interrupted(4.0, "Triton ended")
    watch.loading(5.0)
    watch.loaded(6.0)
    assert watch.in_words() == "demo was started again 2 times"
    watch.failed(7.0, "it failed to load: no module")
    assert watch.in_words() == "demo: it failed to load: no module"
