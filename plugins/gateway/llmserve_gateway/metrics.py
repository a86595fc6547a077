"""Metrics of the gateway, under the names that dashboards for vLLM expect."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from llmserve.server import ModelReport
from llmserve_gateway.model_names import Named
from llmserve_gateway.releases.release import Release
from llmserve_gateway.reply import RequestRecord
from llmserve_gateway.usage import Usage

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_LOAD_SECONDS = (0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_MODEL = ("model_name",)
_ADAPTER = "adapter"
"""The label of counters of a request that an adapter has answered; others do not have it."""
_KEY = "key"
_MOST_KEYS = 1000
_OTHERS = "-"
"""The name under which keys are counted once there are so many names."""
_NO_MODEL = "-"
"""The name under which requests are counted that reach no model."""


@dataclass(eq=False)
class _RunningRequest:
    """A request in flight, and how many of its tokens are counted already."""

    model: str
    adapter: str
    usage: Usage
    counted_input: int = 0
    counted_output: int = 0


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._running_requests: set[_RunningRequest] = set()
        self._adapters: set[tuple[str, str]] = set()
        """The models and their adapters that have answered: other names are not counted by."""

        def seconds(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"vllm:{name}_seconds", text, _MODEL, buckets=buckets,
                             registry=registry)  # fmt: skip

        def counter(name: str, text: str, labels: Sequence[str] = _MODEL) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, labels: Sequence[str] = _MODEL) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        self.waiting = gauge("vllm:num_requests_waiting", "Requests that wait for a slot", ())
        self._running = gauge("vllm:num_requests_running", "Requests that are running")
        self._queue_time = seconds("request_queue_time", "From a request's arrival to its slot")
        self._first_token = seconds("time_to_first_token", "From a request's arrival to first text")
        self._latency = seconds("e2e_request_latency", "From a request's arrival to its end")
        self._token_time = seconds(
            "request_time_per_output_token", "Mean time between tokens of a stream", _TOKEN_SECONDS
        )
        self._input_tokens = counter("vllm:prompt_tokens", "Prompt tokens", (*_MODEL, _ADAPTER))
        self._output_tokens = counter(
            "vllm:generation_tokens", "Generated tokens", (*_MODEL, _ADAPTER)
        )
        self.model_ready = gauge("llmserve_model_ready", "1 if a model answers")
        restarts = "How often `serve` has reloaded a model"
        self.model_restarts = gauge("llmserve_model_restarts", restarts)
        asked = "How many known answers a model was asked again"
        self._certify_checks = gauge("llmserve_certify_checks", asked)
        found = "How often the answers of a model were found to be wrong"
        self._certify_faults = gauge("llmserve_certify_faults", found)
        self._certify_fault = gauge(
            "llmserve_certify_fault", "In how many replicas the answers of a model are wrong"
        )
        judged = "How many answers to users a model has judged"
        self._certify_judged = gauge("llmserve_certify_judged", judged)
        self._load_waits = Histogram(
            "llmserve_model_wait_seconds", "How long requests wait until their model is loaded",
            _MODEL, buckets=_LOAD_SECONDS, registry=registry,
        )  # fmt: skip
        self._load_waiting = gauge(
            "llmserve_requests_waiting_for_model", "Requests that wait until their model is loaded"
        )
        self._loaded = gauge("llmserve_model_loaded", "1 if a model is loaded")
        taken = "Memory of a model's processes, of loaded ones"
        self._memory = gauge("llmserve_model_memory_bytes", taken)
        took = "How long a model's last load took"
        self._load_seconds = gauge("llmserve_model_load_seconds", took)
        used = "Fraction of its cache that a model uses, from 0 to 1"
        self._caches = gauge("vllm:kv_cache_usage_perc", used)
        ended = "Requests by outcome: stop, length, refused, failed, cancelled"
        self._requests = counter("llmserve_requests", ended, (*_MODEL, _ADAPTER, "outcome"))
        per_replica = "Requests in flight at each Triton"
        self._replica_running = gauge(
            "llmserve_replica_requests_running", per_replica, ("replica",)
        )
        refused = "Refused requests by status"
        self._refused = counter("llmserve_refused", refused, ("status",))
        of_key = "Requests of a key that had a slot"
        self._key_requests = counter("llmserve_key_requests", of_key, (_KEY,))
        of_key = "Tokens of a key's prompts and answers"
        self._key_tokens = counter("llmserve_key_tokens", of_key, (_KEY, "of"))
        self._key_names: set[str] = set()

        self._release_share = gauge(
            "llmserve_release_share", "Share of users whom the new build of a model answers"
        )
        answered = "Requests of users that a build has answered during a release"
        build = ("build",)
        self._release_requests = gauge("llmserve_release_requests", answered, (*_MODEL, *build))
        self._release_compared = gauge(
            "llmserve_release_compared", "Requests that both builds have answered"
        )
        self._release_failures = gauge(
            "llmserve_release_failures",
            "Compared requests that a build has failed, by what was wrong",
            (*_MODEL, *build, "measure"),
        )
        self._release_returned = gauge(
            "llmserve_release_returned", "1 if the new build was worse and answers nobody"
        )

    @contextmanager
    def in_flight(self, record: RequestRecord, adapter: str, usage: Usage) -> Iterator[None]:
        running = self._running.labels(record.model)
        running.inc()
        request = _RunningRequest(record.model, adapter, usage)
        self._running_requests.add(request)
        try:
            yield
        finally:
            running.dec()
            self._running_requests.remove(request)
            self._count_tokens(request)
            record.adapter = self._known(request)

    def _count_tokens(self, request: _RunningRequest) -> None:
        """Count the tokens since the last call."""
        input_tokens, output_tokens = request.usage.input_tokens, request.usage.output_tokens
        if request.adapter and input_tokens + output_tokens:
            self._adapters.add((request.model, request.adapter))
        labels = request.model, self._known(request)
        self._input_tokens.labels(*labels).inc(input_tokens - request.counted_input)
        self._output_tokens.labels(*labels).inc(output_tokens - request.counted_output)
        request.counted_input, request.counted_output = input_tokens, output_tokens

    def _known(self, request: _RunningRequest) -> str:
        """Return the adapter of a request if it has ever answered, "" for any other word."""
        return request.adapter if (request.model, request.adapter) in self._adapters else ""

    def observe_load(self, model: str, seconds: float) -> None:
        """Record how long a request has waited until its model was loaded."""
        self._load_waits.labels(model).observe(seconds)

    def update_loads(self, supervised: Sequence[ModelReport], waiting: Mapping[str, int]) -> None:
        """Update the gauges of models that are loaded on demand."""
        for model in supervised:
            if (demand := model.demand) is not None:
                self._loaded.labels(model.name).set(demand.loaded)
                self._memory.labels(model.name).set(demand.size if demand.loaded else 0)
                self._load_waiting.labels(model.name).set(waiting.get(model.name, 0))
                if demand.load_seconds is not None:
                    self._load_seconds.labels(model.name).set(demand.load_seconds)

    def count_request(self, record: RequestRecord) -> None:
        self._requests.labels(record.model or _NO_MODEL, record.adapter, record.outcome).inc()
        if record.outcome == "refused":
            self._refused.labels(record.status).inc()
        if record.key and record.admitted is not None:
            self._count_key(record)
        if not record.model or record.admitted is None:
            return
        first, end = record.first_output, record.ended
        self._queue_time.labels(record.model).observe(record.admitted - record.arrived)
        self._latency.labels(record.model).observe(end - record.arrived)
        if first is not None and record.streamed:
            self._first_token.labels(record.model).observe(first - record.arrived)
            if record.output_tokens > 1:
                mean = (end - first) / (record.output_tokens - 1)
                self._token_time.labels(record.model).observe(mean)

    def _count_key(self, record: RequestRecord) -> None:
        if len(self._key_names) < _MOST_KEYS:
            self._key_names.add(record.key)
        name = record.key if record.key in self._key_names else _OTHERS
        self._key_requests.labels(name).inc()
        self._key_tokens.labels(name, "prompt").inc(record.input_tokens)
        self._key_tokens.labels(name, "answer").inc(record.output_tokens)

    def update(
        self,
        models: Sequence[str],
        supervised: Sequence[ModelReport],
        running: Mapping[str, int],
    ) -> None:
        """Update the gauges of models, of their states in ``serve``, and of replicas."""
        for replica, count in running.items():
            self._replica_running.labels(replica).set(count)
        for name in models:
            # An autoscaler needs a 0 before the first request.
            self._running.labels(name)
        for model in supervised:
            # One that is unloaded answers as well, a little later.
            self.model_ready.labels(model.name).set(model.state.takes_requests)
            self.model_restarts.labels(model.name).set(model.restarts)
            if (certificate := model.certificate) is not None:
                self._certify_checks.labels(model.name).set(certificate.checks)
                self._certify_faults.labels(model.name).set(certificate.faults)
                self._certify_fault.labels(model.name).set(certificate.faulty)
                self._certify_judged.labels(model.name).set(certificate.judged)

    def update_releases(self, releases: Mapping[str, Release]) -> None:
        """Update the gauges of new builds that are tried."""
        for name, release in releases.items():
            self._release_share.labels(name).set(release.share_now)
            self._release_compared.labels(name).set(release.compared)
            self._release_returned.labels(name).set(release.stage == "returned")
            for build, count in release.requests.items():
                self._release_requests.labels(name, build).set(count)
            for measure, seen in release.evidence.items():
                failures = (("old", seen.old_failures), ("new", seen.new_failures))
                for build, count in failures:
                    self._release_failures.labels(name, build, measure).set(count)

    def update_caches(self, usage: Mapping[str, float]) -> None:
        """Replace the cache usage; models that report none have no sample."""
        self._caches.clear()
        for name, fraction in usage.items():
            self._caches.labels(name).set(fraction)

    def text(self, models: Collection[str] = (), keys: Collection[str] | None = None) -> bytes:
        """Return the metrics in Prometheus' text format.

        They are of these models only, if any is named, and of these keys, None for all.
        """
        # The tokens of long streams are counted here while they run, at no cost to their pieces.
        for request in self._running_requests:
            self._count_tokens(request)
        return generate_latest(cast(Any, _Selection(self.registry, models, keys)))


class _Selection:
    """The metrics of a registry, without the samples of other models and of other keys."""

    def __init__(
        self, registry: CollectorRegistry, models: Collection[str], keys: Collection[str] | None
    ) -> None:
        self._registry = registry
        self._models = models
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            selected = copy(metric)
            selected.samples = [_said(each) for each in metric.samples if self._is_visible(each)]
            yield selected

    def _is_visible(self, sample: Any) -> bool:
        if (key := sample.labels.get(_KEY)) is not None:
            return self._keys is None or key in self._keys
        model = sample.labels.get(_MODEL[0], _NO_MODEL)
        named = Named(model, sample.labels.get(_ADAPTER, "")).full
        return not self._models or bool({model, named} & {*self._models, _NO_MODEL})


def _said(sample: Any) -> Any:
    """Return a sample without the label of an adapter if there is none."""
    if sample.labels.get(_ADAPTER) != "":
        return sample
    labels = {name: value for name, value in sample.labels.items() if name != _ADAPTER}
    return sample._replace(labels=labels)
