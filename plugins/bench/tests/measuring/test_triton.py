"""What the server publishes, and which of its models are answered by a stand-in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2

from llmserve.registry import Registry
from llmserve_bench import triton
from llmserve_bench.triton import GaugeSampler, Metrics, Observer, fetch, read_metrics

PAGE = """
# HELP nv_inference_count what the statistics tell better
# TYPE nv_inference_count counter
nv_inference_count{model="demo",version="1"} 12
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="a"} 0.5
nv_gpu_utilization{gpu_uuid="b"} 0.25
# TYPE nv_gpu_memory_used_bytes gauge
nv_gpu_memory_used_bytes{gpu_uuid="a"} 2e9
nv_gpu_memory_used_bytes{gpu_uuid="b"} 1e9
# TYPE acme_tokens_total counter
acme_tokens_total{model="demo",version="1"} 40
acme_tokens_total{model="demo",version="2"} 2
acme_tokens_total{model="other",version="1"} 99
# TYPE acme_running gauge
acme_running{model="demo",version="1"} 3
# TYPE acme_seconds histogram
acme_seconds_bucket{model="demo",le="1"} 4
acme_seconds_bucket{model="demo",le="+Inf"} 5
acme_seconds_sum{model="demo"} 2.5
acme_seconds_count{model="demo"} 5
# TYPE acme_broken gauge
acme_broken{model="demo"} NaN
# TYPE llmserve_stand_in gauge
llmserve_stand_in{model="engine",instead_of="TensorRT-LLM"} 1
llmserve_stand_in{model="gone",instead_of="TensorRT-LLM"} 0
"""


def test_what_a_model_counts_is_told_from_what_rises_and_falls() -> None:
    found = read_metrics(PAGE, ["demo"])
    assert found.counters == {
        "acme_tokens_total": 42.0, "acme_seconds_sum": 2.5, "acme_seconds_count": 5.0
    }  # fmt: skip
    assert found.gauges == {
        "nv_gpu_utilization": 0.375, "nv_gpu_memory_used_bytes": 3e9, "acme_running": 3.0
    }  # fmt: skip
    assert found.stand_ins == {"engine": "TensorRT-LLM"}
    assert read_metrics("no page of {metrics", ["demo"]) == Metrics()


@contextmanager
def published(page: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_an_address_may_be_written_in_several_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with published(PAGE) as place:
        for url in (place, f"http://{place}", f"http://{place}/", f"http://{place}/metrics"):
            assert fetch(url) == PAGE
        assert fetch(f"http://{place}/other") is None
    assert fetch("http://127.0.0.1:9/metrics") is None
    assert fetch("no address") is None


def sampled(pages: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch) -> GaugeSampler:
    """Look at these pages, one after the other, as fast as can be."""
    monkeypatch.setattr(triton, "_LOOK", 0.001)
    waiting = iter(pages)
    observer: Any = SimpleNamespace(read_metrics=lambda: Metrics(gauges=next(waiting, {})))
    with GaugeSampler(observer) as sampler:
        deadline = time.monotonic() + 10
        while len(sampler._seen) < len(pages) and time.monotonic() < deadline:
            time.sleep(0.01)
    return sampler


def test_gauges_have_the_mean_and_the_peak_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    values = [1.0, 2.0, 6.0]
    found = sampled([{"acme_running": v, "idle": 0.0} for v in values], monkeypatch)
    gauges = found.between(began, time.monotonic())
    assert gauges.keys() == {"acme_running"}
    assert (gauges["acme_running"].mean, gauges["acme_running"].peak) == (3.0, 6.0)
    assert found.between(began - 9, began - 1) == {}


def test_a_run_of_a_second_has_no_gauges_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton reads the machine every two seconds: what it says sooner is from before the run.
    began = time.monotonic()
    found = sampled([{"nv_gpu_utilization": 0.1, "acme_running": 1.0}] * 3, monkeypatch)
    assert found.between(began, began + 1.0).keys() <= {"acme_running"}
    # Two looks are too few for a mean.
    assert sampled([{"acme_running": 1.0}] * 2, monkeypatch).between(began, began + 60) == {}


def observed(monkeypatch: pytest.MonkeyPatch, **configs: Any) -> Observer:
    backends = [SimpleNamespace(name="onnxruntime", stand_in_for="onnxruntime")]
    monkeypatch.setattr(Registry, "load", lambda: SimpleNamespace(all=lambda _: backends))
    observer = Observer.__new__(Observer)
    observer._configs = {
        name: model_config_pb2.ModelConfig(name=name, **config) for name, config in configs.items()
    }
    return observer


def test_a_stand_in_is_known_by_what_it_says_and_by_what_triton_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observer = observed(
        monkeypatch,
        engine={"backend": "tensorrtllm", "runtime": "model.py"},
        graph={"backend": "onnxruntime", "runtime": "model.py"},
        real={"backend": "onnxruntime", "runtime": "libtriton_onnxruntime.so"},
        others={"backend": "vllm", "runtime": "model.py"},
        plain={"backend": "python", "runtime": "model.py"},
    )
    says = {"engine": "TensorRT-LLM", "real": "of another server"}
    assert observer._stand_ins(Metrics(stand_ins=says)) == {
        "engine": "TensorRT-LLM", "graph": "onnxruntime"
    }  # fmt: skip
    assert observer._stand_ins(Metrics()) == {"graph": "onnxruntime"}
