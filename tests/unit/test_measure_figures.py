from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from llmserve.measure.figures import Snapshot, difference, read_metrics
from llmserve.measure.runs import ModelFigures, ServerFigures
from llmserve.measure.table import rows, shown
from tests.unit.test_measure_results import LOAD, RUN

METRICS = """
# HELP nv_inference_request_success Number of successful inference requests
nv_inference_request_success{model="demo",version="1"} 12
llmserve_output_tokens_total{model="demo",version="1"} 640
llmserve_output_tokens_total{model="other",version="1"} 7
llmserve_running_sequences{model="demo",version="1"} 3
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5
nv_gpu_utilization{gpu_uuid="GPU-2"} 0.25
acme_odd{model="demo",text="a \\"quoted\\" one"} 1.5e-3
"""


def statistics(count: int, nanoseconds: int, batches: dict[int, int]) -> Any:
    made = service_pb2.ModelStatistics(name="demo", inference_count=count, execution_count=count)
    for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        part = getattr(made.inference_stats, name)
        part.count, part.ns = count, nanoseconds
    for size, ran in batches.items():
        entry = made.batch_stats.add(batch_size=size)
        entry.compute_infer.count = ran
    return made


def test_metrics_of_the_model_itself_are_kept_and_tritons_counters_are_not() -> None:
    assert read_metrics(METRICS, ["demo"]) == {
        "llmserve_output_tokens_total": 640.0,
        "llmserve_running_sequences": 3.0,
        "nv_gpu_utilization": 0.75,
        "acme_odd": 0.0015,
    }
    assert read_metrics("", ["demo"]) == {}
    assert read_metrics("<html>not found</html>", ["demo"]) == {}


def test_only_what_happened_in_the_window_counts() -> None:
    before = Snapshot({"demo": statistics(10, 10**9, {1: 10})}, {"a_total": 5.0, "b": 1.0})
    after = Snapshot({"demo": statistics(30, 4 * 10**9, {1: 10, 4: 5})}, {"a_total": 9.0, "b": 7.0})
    found = difference(before, after)
    assert found is not None
    assert found.models[0].requests == 20
    assert found.models[0].queue == 3.0
    assert found.models[0].batches == {"4": 5}
    assert found.metrics == {"a_total": 4.0, "b": 7.0}
    assert difference(None, after) is None


def table(**changes: Any) -> dict[str, str]:
    return {row.label: row.text for row in shown([rows(replace(RUN, **changes))])[0]}


def test_server_times_are_means_over_our_requests() -> None:
    # An iterative model counts 40 requests for our two: one at each step.
    model = ModelFigures("demo", 40, 1, 40, 20, 3.0, 0.5, 0.0, 2.0, 0.0)
    found = table(server=ServerFigures((model,)))
    assert found["Server: avg. queue (ms)"] == "250.00"
    assert found["Server: avg. compute infer (ms)"] == "1000.00"
    assert found["Server: avg. batch size"] == "2.00"


def test_parts_of_an_ensemble_are_told_apart() -> None:
    model = ModelFigures("demo", 2, 0, 2, 2, 1.0, 0.5, 0.0, 0.5, 0.0)
    part = replace(model, model="demo-tokenize")
    found = table(server=ServerFigures((model, part)))
    assert "Server, demo: avg. queue (ms)" in found
    assert "Server, demo-tokenize: avg. queue (ms)" in found


def test_rows_without_a_value_are_left_out() -> None:
    found = table(server=None, load=replace(LOAD, limit_latency=None, stream=False))
    assert not [label for label in found if "Goodput" in label or "first token" in label]
    assert found["Errors: rejected"] == "1.00"


def test_the_words_of_seed_003_come_first() -> None:
    labels = [row.label for row in rows(RUN)]
    assert labels[:2] == ["Requests/Sec", "OP tokens/sec"]
    assert labels.index("Total requests") == 10
    assert rows(RUN)[0].value == pytest.approx(2.0)
