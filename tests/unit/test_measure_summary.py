from __future__ import annotations

from dataclasses import replace

import pytest

from llmserve.measure.runs import Record
from llmserve.measure.summary import Spread, summarize
from tests.unit.test_measure_results import LOAD, RUN


def test_latency_counts_from_when_a_request_should_have_been_sent() -> None:
    late = Record(0, 1.0, 3.0, 4.0, 5.0, 4, 8, (4.0, 5.0), (4, 4))
    found = summarize(replace(RUN, records=(late,), seconds=5.0))
    assert found.latency is not None
    assert found.latency.mean == 4.0
    assert found.ttft is not None
    assert found.ttft.mean == 3.0
    assert found.inflight == pytest.approx(2.0 / 5.0)


def test_a_piece_of_several_tokens_counts_as_several() -> None:
    # 2 tokens at once, then 4 after 0.4 s and 4 after 0.8 s: 8 tokens in 0.8 s.
    record = Record(0, 0, 0, 0.2, 1.0, 3, 10, (0.2, 0.6, 1.0), (2, 4, 4))
    found = summarize(replace(RUN, records=(record,)))
    assert found.token_time is not None
    assert found.token_time.mean == pytest.approx(0.1)
    assert found.gap is not None
    assert found.gap.p50 == pytest.approx(0.4)


def test_whole_answers_have_no_time_to_first_token() -> None:
    whole = Record(0, 0, 0, 1.0, 1.0, 3, 10, (1.0,), (10,))
    found = summarize(replace(RUN, records=(whole,), load=replace(LOAD, stream=False)))
    assert found.ttft is found.token_time is found.gap is None
    assert found.output_tokens_per_second == pytest.approx(10 / RUN.seconds)


def test_failures_count_as_requests_and_errors_only() -> None:
    found = summarize(RUN)
    assert (found.requests, found.completed) == (2, 1)
    assert found.requests_per_second == 2.0
    assert found.output_tokens == 7
    assert found.latency is not None
    assert found.latency.count == 1


def test_goodput_is_what_held_the_limits() -> None:
    assert summarize(RUN).goodput == 2.0
    assert summarize(RUN).within_limits == 0.5
    strict = replace(LOAD, limit_latency=None, limit_ttft=0.05)
    assert summarize(replace(RUN, load=strict)).goodput == 0.0
    assert summarize(replace(RUN, load=replace(LOAD, limit_latency=None))).goodput is None


def test_percentiles_lie_between_neighbours() -> None:
    found = Spread.of([float(value) for value in range(101)])
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.maximum) == (50, 90, 99, 100)
    assert Spread.of([]) is None


def test_a_run_without_any_answer_has_no_figures() -> None:
    found = summarize(replace(RUN, records=RUN.records[1:]))
    assert found.latency is None
    assert found.requests_per_second == 0
    assert found.errors == {"rejected": 1}
