"""What models and Triton publish on ``/metrics``: read, and looked at while a load runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from llmserve.measure.bench import Target, bench
from llmserve.measure.gauges import Sampler
from llmserve.measure.job import Place
from llmserve.measure.plan import Prompts
from llmserve.measure.published import fetch, read_page
from llmserve.measure.runs import Load, Sampled
from llmserve.measure.table import rows
from tests.unit.scripted_triton import scripted

METRICS = """
# HELP nv_inference_request_success Number of successful inference requests
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="demo",version="1"} 12
llmserve_output_tokens_total{model="demo",version="1"} 640
llmserve_output_tokens_total{model="other",version="1"} 7
llmserve_running_sequences{model="demo",version="1"} 3
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5
nv_gpu_utilization{gpu_uuid="GPU-2"} 0.25
nv_gpu_power_usage{gpu_uuid="GPU-1"} 300
nv_gpu_power_usage{gpu_uuid="GPU-2"} 100
nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 1000
acme_odd{model="demo",text="a \\"quoted\\" one"} 1.5e-3
# TYPE acme_asked counter
acme_asked{model="demo"} 5
# TYPE acme_free_count gauge
acme_free_count{model="demo"} 6
# TYPE acme_seconds histogram
acme_seconds_bucket{model="demo",le="1"} 3
acme_seconds_bucket{model="demo",le="+Inf"} 4
acme_seconds_sum{model="demo"} 2.5
acme_seconds_count{model="demo"} 4
acme_broken{model="demo"} NaN
"""


def test_what_a_model_counts_is_told_from_what_rises_and_falls() -> None:
    page = read_page(METRICS, ["demo"])
    assert page.sums == {
        "llmserve_output_tokens_total": 640.0,
        "acme_asked": 5.0,
        "acme_seconds_sum": 2.5,
        "acme_seconds_count": 4.0,
    }
    assert page.gauges == {
        "llmserve_running_sequences": 3.0,
        # The mean of a share, the sum of all else.
        "nv_gpu_utilization": 0.375,
        "nv_gpu_power_usage": 400.0,
        "acme_odd": 0.0015,
        "acme_free_count": 6.0,
    }
    for text in ("", "<html>not found</html>"):
        assert not read_page(text, ["demo"]).sums
        assert not read_page(text, ["demo"]).gauges


@contextmanager
def serving(text: Callable[[], str]) -> Iterator[str]:
    """A page that says what a function gives at the moment it is asked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/metrics"
            body = text().encode() if found else b""
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("form", ["{}", "http://{}", "http://{}/", "http://{}/metrics"])
def test_an_address_may_be_written_in_several_ways(form: str) -> None:
    with serving(lambda: METRICS) as address:
        assert fetch(form.format(address)) == METRICS


def test_no_page_is_none() -> None:
    assert fetch("http://127.0.0.1:9/metrics") is None
    assert fetch("http://127.0.0.1:nonsense") is None
    with serving(lambda: METRICS) as address:
        assert fetch(f"http://{address}/elsewhere") is None


def test_samples_have_the_mean_and_the_peak_of_the_window_alone() -> None:
    values = iter([9.0, 1.0, 2.0, 6.0])

    def text() -> str:
        return f'nv_gpu_power_usage{{gpu_uuid="GPU-1"}} {next(values, 8.0)}'

    with serving(text) as address, Sampler(f"http://{address}", ["demo"], every=0.05) as sampler:
        # The first look is before the window, and those after the fourth are behind it.
        while len(sampler.seen) < 6:
            time.sleep(0.01)
    times = [at for at, _ in sampler.seen]
    found = sampler.between(times[1], times[3])
    assert found == {"nv_gpu_power_usage": Sampled(3.0, 6.0, 3)}
    assert sampler.between(times[-1] + 1, times[-1] + 2) == {}


def test_nothing_is_asked_again_where_nothing_is_published() -> None:
    asked = []

    def text() -> str:
        asked.append(time.monotonic())
        return "nv_inference_count 3"

    with serving(text) as address, Sampler(f"http://{address}", ["demo"], every=0.02) as sampler:
        time.sleep(0.3)
    assert len(asked) == 1
    assert sampler.seen == []


def test_a_page_that_does_not_answer_keeps_nobody() -> None:
    def text() -> str:
        time.sleep(4.0)
        return METRICS

    with serving(text) as address:
        began = time.monotonic()
        with Sampler(f"http://{address}", ["demo"], every=0.02):
            time.sleep(0.1)
        assert time.monotonic() - began < 2.0


def test_a_run_tells_what_the_machine_did_meanwhile() -> None:
    def text() -> str:
        return 'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5'

    with scripted(first=1.6, tokens=(1,)) as server, serving(text) as address:
        target = Target("whole", Place(server.url), metrics_url=f"http://{address}/metrics")
        run = bench(target, Load.closed(2, requests=2, warmup=2), Prompts())
    assert run.server is not None
    # Twice in the window of 1.6 s; the warm-up took as long.
    assert run.server.samples == {"nv_gpu_utilization": Sampled(0.5, 0.5, 2)}


def test_a_server_that_publishes_nothing_has_no_rows_of_it() -> None:
    with scripted(first=0.4, tokens=(1,)) as server:
        run = bench(Target("whole", Place(server.url)), Load.closed(1, requests=1), Prompts())
    assert run.server is not None
    assert run.server.samples == {}
    assert not [row.label for row in rows(run) if "GPU" in row.label or "CPU" in row.label]
