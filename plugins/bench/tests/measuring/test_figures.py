"""The meaning of the figures, and the confidence in differences."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean, median

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
from llmserve_bench.measure import window
from llmserve_bench.results import Case, Load, Record

from .examples import make_case, make_comparison, make_run


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=40))
def test_an_interval_contains_its_mean_and_inverts_with_the_ratio(ratios: list[float]) -> None:
    middle, low, high = interval(ratios)
    assert low <= middle * 1.000001
    assert middle <= high * 1.000001
    inverse = interval([1 / ratio for ratio in ratios])
    assert inverse == pytest.approx((1 / middle, 1 / high, 1 / low), rel=1e-6)


def test_the_interval_contains_the_true_ratio_in_95_percent_of_cases() -> None:
    draw = random.Random(7)
    hits = 0
    for _ in range(2000):
        _, low, high = interval([1.2 * draw.lognormvariate(0, 0.1) for _ in range(5)])
        hits += low <= 1.2 <= high
    assert hits / 2000 == pytest.approx(0.95, abs=0.015)


def test_latency_counts_from_when_a_request_was_due() -> None:
    record = Record(0, scheduled=1.0, sent=1.5, done=3.0, pieces=(2.0, 3.0), tokens=(1, 4))
    assert (record.latency, record.first_token, record.token_time) == (2.0, 1.0, 0.25)


def test_failures_count_as_requests_and_errors_only() -> None:
    run = make_run("static", requests=20, failing=5)
    figures = figures_of(run, Load(concurrency=4))
    assert (figures["requests"], figures["failed"]) == (20, 5)
    assert figures["requests_per_second"] == pytest.approx(15 / run.seconds)
    assert figures["latency_mean"] == pytest.approx(fmean(r.latency for r in run.records[5:]))


def test_whole_answers_have_no_time_to_first_token() -> None:
    run = make_run("static", stream=False)
    assert "ttft_mean" not in figures_of(run, Load(concurrency=4, stream=True))


def test_gaps_are_between_chunks_and_a_coarse_stream_is_seen() -> None:
    """Two answers at the same speed, one in chunks of a token and one of four."""
    steps = [round(0.1 * n, 6) for n in range(1, 9)]
    fine = Record(0, 0.0, 0.0, 0.8, tuple(steps), (1,) * 8, output_tokens=8)
    coarse = Record(0, 0.0, 0.0, 0.8, tuple(steps[3::4]), (4, 4), output_tokens=8)
    one = make_run("static", requests=1)
    by_chunk = [
        figures_of(replace(one, records=(record,)), Load(stream=True)) for record in (fine, coarse)
    ]
    assert [round(f["gap_p50"], 6) for f in by_chunk] == [0.1, 0.4]
    assert [round(f["gap_p95"], 6) for f in by_chunk] == [0.1, 0.4]
    assert [f["chunk_tokens"] for f in by_chunk] == [1, 4]
    stalled = replace(fine, pieces=(*steps[:7], 5.0))
    figures = figures_of(replace(one, records=(stalled,)), Load(stream=True))
    assert figures["gap_p50"] == pytest.approx(0.1)
    assert 1 < figures["gap_p95"] < figures["gap_max"] == pytest.approx(4.3)
    assert "gap_p50" not in figures_of(make_run("static", stream=False), Load(stream=True))


def test_goodput_counts_requests_within_the_limits() -> None:
    run = make_run("static", requests=40)
    limit = median(record.latency for record in run.records)
    figures = figures_of(run, Load(limit_latency=limit))
    assert figures["within_limits"] == 0.5
    assert figures["goodput"] == pytest.approx(20 / run.seconds)
    assert figures_of(run, Load(limit_ttft=1e-9))["goodput"] == 0


def test_tritons_times_are_means_over_our_requests() -> None:
    case = make_case("static", requests=50)
    model = case.runs[0].server.models[0] if case.runs[0].server else None
    assert model is not None
    rows = {figure.label: values for figure, values in rounds_of(case).items()}
    assert rows["Server: queue"] == [pytest.approx(model.queue / 50)]
    assert rows["Server: rows per batch"] == [model.inferences / model.executions]


def test_a_clear_difference_has_an_interval_on_its_side_of_one() -> None:
    ratios = {ratio.figure: ratio for ratio in ratios_of(make_comparison(rounds=5))}
    assert 1 < ratios["requests_per_second"].low < ratios["requests_per_second"].ratio
    assert ratios["latency_p50"].ratio < (ratios["latency_p50"].high or 9) < 1


def test_equal_cases_have_an_interval_around_one_and_a_single_round_has_none() -> None:
    equal = make_comparison(rounds=5, names=("a", "a2"), same=True)
    assert all(ratio.low <= 1 <= (ratio.high or 0) for ratio in ratios_of(equal))
    single = ratios_of(make_comparison(rounds=1))
    assert {(ratio.low, ratio.high) for ratio in single} == {(0.0, None)}


def test_the_ranking_puts_those_within_the_limit_first() -> None:
    fast = make_case("iterative", rounds=3, limit=1e-3)
    slow = make_case("static", rounds=3, limit=100.0)
    places = ranking([fast, slow, make_case("static", rounds=3, state="stopped")])
    assert [place.within_limits for place in places] == [True, False]
    again = ranking([make_case("static", rounds=3), make_case("iterative", rounds=3)])
    assert [place.name for place in again] == ["iterative", "static"]
    assert min(again[0].rounds) > max(again[1].rounds)


def test_only_requests_done_within_a_duration_count() -> None:
    records = [Record(at, 0.0, 0.0, done) for at, done in enumerate((1.0, 2.0, 3.0))]
    counted, seconds = window([Report(records, 9.0)], Load(concurrency=1, duration=2.5))
    assert (counted, seconds) == (records[:2], 2.5)
    # Without a duration the last answer ends it.
    assert window([Report(records, 9.0)], Load(concurrency=1, requests=3)) == (records, 3.0)


def test_a_case_without_any_answer_is_not_ranked() -> None:
    case = Case(make_case("static").subject, Load(concurrency=1), (make_run("static", failing=98),))
    assert ranking([case]) == []
