"""The server's own figures of a run: Triton's statistics, and the gauges it publishes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from math import isfinite
from statistics import fmean
from typing import Any
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from llmserve.client import parse_url
from llmserve.errors import UnreachableError
from llmserve.plugin import Backend, Registry
from llmserve.runtime.contract import STAND_IN_METRIC
from llmserve.server import stand_ins
from llmserve_bench.figures import MACHINE_GAUGES
from llmserve_bench.results import Gauge, ModelFigures, ServerFigures
from llmserve_bench.targets import Target

_PARTS = "llmserve.parts"
_PYTHON = "model.py"
_CALL_SECONDS = 5.0
_SETTLE_SECONDS = 2.0
_TIMES = ("success", "queue", "compute_input", "compute_infer", "compute_output")
_SHARES = ("nv_gpu_utilization", "nv_cpu_utilization")
_SAMPLE_EVERY = 0.5
_MACHINE_AGE = 2.0
"""Triton reads the machine every two seconds: until then its gauges predate the run."""
# A web proxy cannot reach the loopback address of this machine.
_open = build_opener(ProxyHandler({})).open

Statistics = Mapping[str, Any]
Samples = Sequence[tuple[float, Mapping[str, float]]]
"""Gauges by name, each with the time at which they were read."""


def fetch(url: str) -> str | None:
    try:
        with _open(url, timeout=_CALL_SECONDS) as response:
            return str(response.read().decode(errors="replace"))
    except (OSError, HTTPException, ValueError):
        return None


def read_gauges(text: str, models: Iterable[str]) -> dict[str, float]:
    """Read the gauges of these models and of the machine.

    Values with the same name are added up, except for shares of a device, which are averaged.
    """
    values: dict[str, list[float]] = {}
    try:
        families = [f for f in text_string_to_metric_families(text) if f.type == "gauge"]
    except ValueError:
        return {}
    for name, labels, value, *_ in (sample for family in families for sample in family.samples):
        relevant = name != STAND_IN_METRIC and labels.get("model") in (None, *models)
        reported = not name.startswith("nv_") or name in MACHINE_GAUGES
        if relevant and reported and isfinite(value):
            values.setdefault(name, []).append(value)
    return {name: fmean(v) if name in _SHARES else sum(v) for name, v in values.items()}


def gauges_of(samples: Samples, began: float, ended: float) -> dict[str, Gauge]:
    """Return the mean and the peak of each gauge that was not 0 all the time."""
    values: dict[str, list[float]] = {}
    for at, gauges in samples:
        for name, value in gauges.items():
            if began + (_MACHINE_AGE if name in MACHINE_GAUGES else 0.0) <= at <= ended:
                values.setdefault(name, []).append(value)
    return {name: Gauge(fmean(v), max(v)) for name, v in values.items() if max(v) > 0}


def replaced_among(configs: Mapping[str, Any], published: Mapping[str, str]) -> dict[str, str]:
    """Map each model that a stand-in serves to what it stands in for.

    A stand-in publishes this on ``/metrics``. If that cannot be reached, Triton's configuration
    still shows that Python runs a backend for which a plugin here registers a stand-in. A model
    run by a library is never a stand-in, even if another server's metrics list its name.
    """
    registered = {b.name: b.stand_in_for for b in Registry.load().all(Backend)}
    replaced = {}
    for name, config in configs.items():
        python = registered.get(config.backend) if config.runtime == _PYTHON else None
        instead_of = published.get(name) or python
        if instead_of and config.runtime in ("", _PYTHON):
            replaced[name] = instead_of
    return replaced


class Observer:
    """Reads the figures of a model and of its parts; only Triton has any."""

    def __init__(self, target: Target) -> None:
        self._configs: dict[str, Any] = {}
        self._samples: list[tuple[float, Mapping[str, float]]] = []
        if target.api != "triton":
            return
        self.metrics_url = target.triton.metrics
        options, address = [("grpc.enable_http_proxy", 0)], parse_url(target.url)
        self._client = InferenceServerClient(str(address), ssl=address.tls, channel_args=options)
        self._configs = self._read_configs(target.model)

    def close(self) -> None:
        if self._configs:
            self._client.close()

    def statistics(self) -> Statistics:
        """Read all counters; empty if the server does not report them."""
        try:
            return {
                name: self._client.get_inference_statistics(
                    name, client_timeout=_CALL_SECONDS
                ).model_stats[0]
                for name in self._configs
            }
        except (InferenceServerException, IndexError):
            return {}

    def settled(self, before: Statistics, answered: int) -> Statistics:
        """Read all counters once they include this many more answers.

        Triton counts a batch when all of it is over, which can be well after its last answer was
        sent. If a count stays below that, because requests were never accepted, the wait is short.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (now := self.statistics()) and before and time.monotonic() < deadline:
            model = next(iter(now))
            if _answered(now[model]) - _answered(before[model]) >= answered:
                break
            time.sleep(0.02)
        return now

    def sample(self) -> None:
        now = time.monotonic()
        due = not self._samples or now - self._samples[-1][0] >= _SAMPLE_EVERY
        if due and self._configs:
            page = fetch(self.metrics_url) or ""
            self._samples.append((now, read_gauges(page, self._configs)))

    def figures(
        self, before: Statistics, after: Statistics, began: float, ended: float
    ) -> ServerFigures | None:
        if not (before and after):
            return None
        whole, *parts = [_difference(name, before[name], after[name]) for name in after]
        used = [part for part in parts if part.requests or part.executions]
        gauges = gauges_of(self._samples, began, ended)
        replaced = replaced_among(self._configs, stand_ins(self.metrics_url))
        return ServerFigures((whole, *used), gauges, replaced)

    def _read_configs(self, model: str) -> dict[str, Any]:
        """Read the configuration of a model, and of the ensemble steps and parts that it calls."""
        try:
            whole = self._client.get_model_config(model, client_timeout=_CALL_SECONDS).config
        except InferenceServerException as error:
            raise UnreachableError(f"{model!r} does not answer: {error.message()}") from None
        configs = {model: whole}
        parts = [step.model_name for step in whole.ensemble_scheduling.step]
        parts += whole.parameters[_PARTS].string_value.split() if _PARTS in whole.parameters else []
        for part in parts:
            with suppress(InferenceServerException):
                response = self._client.get_model_config(part, client_timeout=_CALL_SECONDS)
                configs[part] = response.config
        return configs


def _answered(statistics: Any) -> int:
    stats = statistics.inference_stats
    return int(stats.success.count + stats.fail.count)


def _difference(name: str, before: Any, after: Any) -> ModelFigures:
    old, new = before.inference_stats, after.inference_stats
    times = {what: (getattr(new, what).ns - getattr(old, what).ns) / 1e9 for what in _TIMES}
    return ModelFigures(
        model=name,
        requests=_answered(after) - _answered(before),
        inferences=after.inference_count - before.inference_count,
        executions=after.execution_count - before.execution_count,
        **times,
    )
