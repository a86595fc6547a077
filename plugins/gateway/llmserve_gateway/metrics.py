"""Metrics of the gateway, under the names that dashboards for vLLM know."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_MODEL = ("model_name",)


class Metrics:
    """Counts what passes; one instance per gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.running = Gauge(
            "vllm:num_requests_running", "Requests under way", _MODEL, registry=self.registry
        )
        self.waiting = Gauge(
            "vllm:num_requests_waiting", "Requests that wait for a place", registry=self.registry
        )
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "From the request's arrival to the first text",
            _MODEL,
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.latency = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From the request's arrival to the end of the answer",
            _MODEL,
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "vllm:prompt_tokens", "Tokens read", _MODEL, registry=self.registry
        )
        self.generated_tokens = Counter(
            "vllm:generation_tokens", "Tokens written", _MODEL, registry=self.registry
        )
        self.finished = Counter(
            "llmserve_requests",
            "Requests by how they ended: stop, length, refused, failed, cancelled",
            (*_MODEL, "outcome"),
            registry=self.registry,
        )

    def text(self) -> bytes:
        """Return all of it in Prometheus' text format."""
        return generate_latest(self.registry)
