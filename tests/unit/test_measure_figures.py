from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from llmserve.measure.figures import Observer, Snapshot, difference
from llmserve.measure.runs import ModelFigures, Sampled, ServerFigures
from llmserve.measure.table import rows, shown
from tests.unit.test_measure_results import LOAD, RUN


def statistics(count: int, nanoseconds: int, batches: dict[int, int]) -> Any:
    made = service_pb2.ModelStatistics(name="demo", inference_count=count, execution_count=count)
    for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        part = getattr(made.inference_stats, name)
        part.count, part.ns = count, nanoseconds
    for size, ran in batches.items():
        entry = made.batch_stats.add(batch_size=size)
        entry.compute_infer.count = ran
    return made


def test_only_what_happened_in_the_window_counts() -> None:
    before = Snapshot({"demo": statistics(10, 10**9, {1: 10})}, {"a_total": 5.0})
    after = Snapshot({"demo": statistics(30, 4 * 10**9, {1: 10, 4: 5})}, {"a_total": 9.0, "b": 7.0})
    found = difference(before, after)
    assert found is not None
    assert found.models[0].requests == 20
    assert found.models[0].queue == 3.0
    assert found.models[0].batches == {"4": 5}
    assert found.metrics == {"a_total": 4.0, "b": 7.0}
    assert difference(None, after) is None


class Late(Observer):
    """Sees counts that come one look later each."""

    def __init__(self, *counts: int) -> None:
        self._names = ["demo"]
        self._counts = list(counts)

    def look(self) -> Snapshot:
        count = self._counts.pop(0) if len(self._counts) > 1 else self._counts[0]
        return Snapshot({"demo": statistics(count, 10**9, {})}, {})


def test_a_batch_that_is_counted_after_its_answers_left_is_waited_for() -> None:
    observer = Late(10, 12, 15, 18, 19)
    found = difference(before := observer.look(), observer.look_after(before, 8))
    assert found is not None
    assert found.models[0].requests == 8


def test_what_is_never_counted_is_not_waited_for_long() -> None:
    observer = Late(10, 12)
    began = time.monotonic()
    after = observer.look_after(observer.look(), 8)
    assert after is not None
    assert after.models["demo"].inference_count == 12
    assert time.monotonic() - began < 2
    assert observer.look_after(None, 8) is not None


def table(**changes: Any) -> dict[str, str]:
    return {row.label: row.text for row in shown([rows(replace(RUN, **changes))])[0]}


def test_server_times_are_means_over_our_requests() -> None:
    # An iterative model counts 40 requests for our two: one at each step.
    model = ModelFigures("demo", 40, 1, 40, 20, 3.0, 0.5, 0.0, 2.0, 0.0)
    found = table(server=ServerFigures((model,)))
    assert found["Server: avg. queue (ms)"] == "250.00"
    assert found["Server: avg. compute infer (ms)"] == "1000.00"
    assert found["Server: avg. batch size"] == "2.00"


def test_what_was_sampled_stands_in_the_units_of_people() -> None:
    model = ModelFigures("demo", 2, 0, 2, 2, 1.0, 0.5, 0.0, 0.5, 0.0)
    samples = {
        "nv_gpu_utilization": Sampled(0.5, 0.875, 8),
        "nv_gpu_memory_used_bytes": Sampled(12.5e9, 13e9, 8),
        "acme_waiting": Sampled(1.5, 4.0, 8),
    }
    found = table(server=ServerFigures((model,), {}, samples))
    assert found["Server: avg. GPU utilization (%)"] == "50.00"
    assert found["Server: peak GPU utilization (%)"] == "87.50"
    assert found["Server: peak GPU memory (GB)"] == "13.00"
    assert found["Server: peak acme_waiting"] == "4.00"
    assert not [label for label in found if "power" in label]


def test_parts_of_an_ensemble_are_told_apart() -> None:
    whole = ModelFigures("demo", 2, 0, 2, 2, 1.0, 0.0, 0.0, 0.25, 0.0)
    part = ModelFigures("demo_tokenize", 2, 0, 2, 1, 0.5, 0.125, 0.0, 0.25, 0.0)
    found = table(server=ServerFigures((whole, part)))
    assert found["Server: avg. in all (ms)"] == "500.00"
    assert found["Server: executions"] == "2.00"
    assert found["Server, tokenize: avg. queue (ms)"] == "62.50"
    assert found["Server, tokenize: avg. batch size"] == "2.00"
    # It has neither a queue nor batches of its own.
    assert "Server: avg. queue (ms)" not in found
    assert "Server: avg. batch size" not in found


def test_rows_without_a_value_are_left_out() -> None:
    found = table(server=None, load=replace(LOAD, limit_latency=None, stream=False))
    assert not [label for label in found if "Goodput" in label or "first token" in label]
    assert found["Errors: rejected"] == "1.00"


def test_the_words_of_seed_003_come_first() -> None:
    labels = [row.label for row in rows(RUN)]
    assert labels[:2] == ["Requests/Sec", "OP tokens/sec"]
    assert labels.index("Total requests") == 10
    assert rows(RUN)[0].value == pytest.approx(2.0)
