"""The figures that the server publishes, and the detection of stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tritonclient.grpc import model_config_pb2

from llmserve.plugin import Registry
from llmserve.testing.web import metrics_page
from llmserve_bench.results import Gauge
from llmserve_bench.triton import Samples, fetch, gauges_of, read_gauges, replaced_among

PAGE = """
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="demo",version="1"} 12
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="a"} 0.5
nv_gpu_utilization{gpu_uuid="b"} 0.25
# TYPE nv_gpu_memory_used_bytes gauge
nv_gpu_memory_used_bytes{gpu_uuid="a"} 2e9
nv_gpu_memory_used_bytes{gpu_uuid="b"} 1e9
# TYPE acme_tokens_total counter
acme_tokens_total{model="demo",version="1"} 40
# TYPE acme_running gauge
acme_running{model="demo",version="1"} 3
acme_running{model="other",version="1"} 99
# TYPE acme_broken gauge
acme_broken{model="demo"} NaN
# TYPE llmserve_stand_in gauge
llmserve_stand_in{model="engine",instead_of="TensorRT-LLM"} 1
llmserve_stand_in{model="gone",instead_of="TensorRT-LLM"} 0
"""


def test_gauges_of_a_model_and_of_the_machine_are_read() -> None:
    assert read_gauges(PAGE, ["demo"]) == {
        "nv_gpu_utilization": 0.375, "nv_gpu_memory_used_bytes": 3e9, "acme_running": 3.0
    }  # fmt: skip
    assert read_gauges("no page of {metrics", ["demo"]) == {}


def test_metrics_are_fetched_without_the_web_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with metrics_page(PAGE) as url:
        assert fetch(f"{url}/metrics") == PAGE
        assert fetch(f"{url}/other") is None
    assert fetch("http://127.0.0.1:9/metrics") is None
    assert fetch("no address") is None


def a_second_apart(*pages: dict[str, float]) -> Samples:
    return [(float(at), page) for at, page in enumerate(pages)]


def test_gauges_have_the_mean_and_the_peak_of_the_run() -> None:
    samples = a_second_apart(*({"acme_running": value, "idle": 0.0} for value in (1.0, 2.0, 6.0)))
    assert gauges_of(samples, 0, 9) == {"acme_running": Gauge(3.0, 6.0)}
    assert gauges_of(samples, 5, 9) == {}


def test_gauges_of_the_machine_belong_to_the_run() -> None:
    # Triton reads the machine every two seconds: earlier values are from before the run.
    samples = a_second_apart(*({"nv_gpu_utilization": v} for v in (0.9, 0.9, 0.1, 0.2, 0.3)))
    gauge = gauges_of(samples, 0, 4)["nv_gpu_utilization"]
    assert gauge.mean == pytest.approx(0.2)
    assert gauge.peak == 0.3


def test_a_stand_in_is_recognized_by_its_metrics_and_by_its_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends = [SimpleNamespace(name="onnxruntime", stand_in_for="onnxruntime")]
    monkeypatch.setattr(Registry, "load", lambda: SimpleNamespace(all=lambda _: backends))
    models = {
        "engine": {"backend": "tensorrtllm", "runtime": "model.py"},
        "graph": {"backend": "onnxruntime", "runtime": "model.py"},
        "real": {"backend": "onnxruntime", "runtime": "libtriton_onnxruntime.so"},
        "others": {"backend": "vllm", "runtime": "model.py"},
        "plain": {"backend": "python", "runtime": "model.py"},
    }
    configs = {name: model_config_pb2.ModelConfig(name=name, **c) for name, c in models.items()}
    published = {"engine": "TensorRT-LLM", "real": "of another server"}
    expected = {"engine": "TensorRT-LLM", "graph": "onnxruntime"}
    assert replaced_among(configs, published) == expected
    assert replaced_among(configs, {}) == {"graph": "onnxruntime"}
