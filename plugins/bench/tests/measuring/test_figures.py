"""What the figures mean, and when a difference is called one."""

from __future__ import annotations

import random
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve_bench.figures import (
    figures_of,
    interval,
    ranking,
    ratios_of,
    rounds_of,
)
from llmserve_bench.generator import Report
from llmserve_bench.measure import stop_losers, window
from llmserve_bench.results import Case, Load, Record
from llmserve_bench.tables import tables_of

from .examples import make_case, make_comparison, make_run


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=40))
def test_an_interval_holds_its_mean_and_turns_with_the_ratio(ratios: list[float]) -> None:
    middle, low, high = interval(ratios)
    assert low <= middle * 1.000001
    assert middle <= high * 1.000001
    back = interval([1 / ratio for ratio in ratios])
    assert back == pytest.approx((1 / middle, 1 / high, 1 / low), rel=1e-6)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    draw = random.Random(7)
    held = 0
    for _ in range(2000):
        _, low, high = interval([1.2 * draw.lognormvariate(0, 0.1) for _ in range(5)])
        held += low <= 1.2 <= high
    assert held / 2000 == pytest.approx(0.95, abs=0.015)


def test_latency_counts_from_when_a_request_was_due() -> None:
    record = Record(0, scheduled=1.0, sent=1.5, done=3.0, pieces=(2.0, 3.0), tokens=(1, 4))
    assert (record.latency, record.first_token, record.token_time) == (2.0, 1.0, 0.25)


def test_failures_count_as_requests_and_errors_only() -> None:
    run = make_run("static", requests=20, failing=5)
    found = figures_of(run, Load(concurrency=4))
    assert (found["requests"], found["failed"]) == (20, 5)
    assert found["requests_per_second"] == pytest.approx(15 / run.seconds)
    assert found["latency_mean"] == pytest.approx(fmean(r.latency for r in run.records[5:]))


def test_whole_answers_have_no_time_to_first_token() -> None:
    run = make_run("static", stream=False)
    assert "ttft_mean" not in figures_of(run, Load(concurrency=4, stream=True))


def test_goodput_is_what_held_the_limits() -> None:
    run = make_run("static", requests=40)
    limit = median(record.latency for record in run.records)
    found = figures_of(run, Load(limit_latency=limit))
    assert found["within_limits"] == 0.5
    assert found["goodput"] == pytest.approx(20 / run.seconds)
    assert figures_of(run, Load(limit_ttft=1e-9))["goodput"] == 0


def test_counts_are_whole_and_what_did_not_happen_is_left_out() -> None:
    (table,) = tables_of(make_comparison((16,), rounds=2, requests=60))[1:]
    rows = {row[0]: row[1] for row in table.rows}
    assert rows["Requests"] == "60"
    assert "Failed requests" not in rows
    assert not any("OP tokens" in name for name in rows)


def test_triton_s_times_are_means_over_our_requests() -> None:
    case = make_case("static", requests=50)
    model = case.runs[0].server.models[0] if case.runs[0].server else None
    assert model is not None
    rows = {figure.label: values for figure, values in rounds_of(case).items()}
    assert rows["Server: queue"] == [pytest.approx(model.queue / 50)]
    assert rows["Server: rows per batch"] == [model.inferences / model.executions]


def test_a_clear_difference_is_called_one_in_the_right_direction() -> None:
    verdicts = {r.figure.name: r.verdict for r in ratios_of(make_comparison(rounds=5))}
    assert verdicts["requests_per_second"] == "better"
    assert verdicts["latency_p50"] == "better"


@pytest.mark.parametrize("given", [
    {"rounds": 5, "names": ("a", "a2"), "same": True}, {"rounds": 1}, {"rounds": 5, "failing": 3}
])  # fmt: skip
def test_what_the_spread_or_failures_swallow_is_unclear(given: dict[str, Any]) -> None:
    assert {ratio.verdict for ratio in ratios_of(make_comparison(**given))} == {"unclear"}


def test_the_ranking_puts_those_within_the_limit_first_and_marks_overlaps() -> None:
    fast = make_case("iterative", rounds=3, limit=1e-3)
    slow = make_case("static", rounds=3, limit=100.0)
    places = ranking([fast, slow, make_case("static", rounds=3, state="stopped")])
    assert [place.within for place in places] == [True, False]
    again = ranking([make_case("static", rounds=3), make_case("static", rounds=3)])
    assert again[1].overlaps
    apart = ranking([make_case("iterative", rounds=3), make_case("static", rounds=3)])
    assert not apart[1].overlaps


def test_what_cannot_win_is_stopped_and_says_why() -> None:
    def cases(limit: float | None = None) -> list[Case]:
        return [make_case("iterative", limit=limit), make_case("static", slots=2, limit=limit)]

    found = stop_losers(cases())
    assert [case.state for case in found] == ["done", "stopped"]
    assert "the best" in found[1].why
    # Where nothing is within the limit, nothing can be judged by it.
    assert [case.state for case in stop_losers(cases(limit=1e-6))] == ["done", "done"]


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1), st.floats(0.5, 12))
def test_only_what_was_done_in_a_duration_counts(
    spans: list[tuple[float, float]], duration: float
) -> None:
    records = [Record(at, a, a, a + b) for at, (a, b) in enumerate(spans)]
    report = Report(records=list(records), seconds=max(duration, 20.0))
    counted, seconds, unfinished = window([report], Load(concurrency=1, duration=duration))
    assert seconds == duration
    assert all(record.done <= duration for record in counted)
    assert len(counted) + len(unfinished) == len(records)


def test_a_case_without_any_answer_has_no_place() -> None:
    case = Case(make_case("static").subject, Load(concurrency=1), (make_run("static", failing=98),))
    assert ranking([case]) == []
