"""Metrics of the gateway, under the names that dashboards for vLLM know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from llmserve_gateway.reply import Visit
from llmserve_gateway.usage import Usage

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_EACH_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_MODEL = ("model_name",)


@dataclass(eq=False)
class _Counted:
    """How much of a request under way the counters have."""

    model: str
    usage: Usage
    read: int = 0
    written: int = 0


class Metrics:
    """Counts what passes; one instance per gateway."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._live: set[_Counted] = set()

        def seconds(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"vllm:{name}_seconds", text, _MODEL, buckets=buckets,
                             registry=registry)  # fmt: skip

        def counter(name: str, text: str, labels: Sequence[str] = _MODEL) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, labels: Sequence[str] = _MODEL) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        self.waiting = gauge("vllm:num_requests_waiting", "Requests that wait for a place", ())
        self._running = gauge("vllm:num_requests_running", "Requests under way")
        self._queue = seconds("request_queue_time", "From a request's arrival to its place")
        self._first = seconds("time_to_first_token", "From a request's arrival to its first text")
        self._latency = seconds("e2e_request_latency", "From a request's arrival to its end")
        self._each = seconds(
            "request_time_per_output_token", "Between tokens, the mean of a stream", _EACH_SECONDS
        )
        self._read = counter("vllm:prompt_tokens", "Tokens read")
        self._written = counter("vllm:generation_tokens", "Tokens written")
        self.model_ready = gauge("llmserve_model_ready", "1 where a model answers")
        restarts = "How often `serve` has loaded a model anew"
        self.model_restarts = gauge("llmserve_model_restarts", restarts)
        used = "How much of its cache a model uses, 1 is all of it"
        self._caches = gauge("vllm:kv_cache_usage_perc", used)
        ended = "Requests by how they ended: stop, length, refused, failed, cancelled"
        self._ended = counter("llmserve_requests", ended, (*_MODEL, "outcome"))
        each = "Requests under way at each Triton"
        self._each_running = gauge("llmserve_replica_requests_running", each, ("replica",))
        refused = "Requests refused, by status"
        self._refused = counter("llmserve_refused", refused, ("status",))

    @contextmanager
    def under_way(self, model: str, usage: Usage) -> Iterator[None]:
        running = self._running.labels(model)
        running.inc()
        counted = _Counted(model, usage)
        self._live.add(counted)
        try:
            yield
        finally:
            running.dec()
            self._live.remove(counted)
            self._count(counted)

    def _count(self, counted: _Counted) -> None:
        """Count what has come since the last time."""
        read, written = counted.usage.read, counted.usage.written
        self._read.labels(counted.model).inc(read - counted.read)
        self._written.labels(counted.model).inc(written - counted.written)
        counted.read, counted.written = read, written

    def ended(self, visit: Visit) -> None:
        self._ended.labels(visit.model or "-", visit.outcome).inc()
        if visit.outcome == "refused":
            self._refused.labels(visit.status).inc()
        if not visit.model or visit.admitted is None:
            return
        end = visit.ended
        self._queue.labels(visit.model).observe(visit.admitted - visit.arrived)
        self._latency.labels(visit.model).observe(end - visit.arrived)
        if visit.first is not None and visit.streamed:
            self._first.labels(visit.model).observe(visit.first - visit.arrived)
            if visit.written > 1:
                each = (end - visit.first) / (visit.written - 1)
                self._each.labels(visit.model).observe(each)

    def show(
        self,
        models: Sequence[str],
        supervised: Sequence[Mapping[str, Any]],
        running: Mapping[str, int],
    ) -> None:
        """Take in which models there are, what ``serve`` tells of each, and what replicas do."""
        for replica, count in running.items():
            self._each_running.labels(replica).set(count)
        for name in models:
            # Who scales by it wants a 0 before the first request.
            self._running.labels(name)
        for one in supervised:
            self.model_ready.labels(one["name"]).set(one["state"] in ("ready", "suspect"))
            self.model_restarts.labels(one["name"]).set(one["restarts"])

    def show_caches(self, use: Mapping[str, float]) -> None:
        """Take in how full caches are; of one that nothing is told of, nothing is said."""
        self._caches.clear()
        for name, part in use.items():
            self._caches.labels(name).set(part)

    def text(self) -> bytes:
        """Return all of it in Prometheus' text format."""
        # Long streams count while they run, at no cost to their pieces.
        for counted in self._live:
            self._count(counted)
        return generate_latest(self.registry)
