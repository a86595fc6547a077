"""What the server says of a run: Triton's statistics, and what is published on ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from math import isfinite
from statistics import fmean
from threading import Event, Thread
from typing import Any
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from llmserve.client.url import parse_url
from llmserve.errors import UnreachableError
from llmserve.registry import Registry
from llmserve.roles import Backend
from llmserve.runtime.contract import STAND_IN_METRIC
from llmserve_bench.figures import MACHINE_GAUGES
from llmserve_bench.results import Gauge, ModelFigures, ServerFigures
from llmserve_bench.targets import Target

_PARTS = "llmserve.parts"
_PYTHON = "model.py"
_PATIENCE = 5.0
_SETTLING = 0.5
_TIMES = ("success", "queue", "compute_input", "compute_infer", "compute_output")
_SHARES = ("nv_gpu_utilization", "nv_cpu_utilization")
_LOOK = 0.5
"""Seconds between two looks at the gauges."""
_FEWEST_LOOKS = 3
_MACHINE_AGE = 2.0
"""Triton reads the machine every two seconds: until then its gauges are from before the run."""
# A proxy that is set for the web cannot reach this machine's own loopback.
_open = build_opener(ProxyHandler({})).open


@dataclass(frozen=True)
class Metrics:
    """The page of metrics at a moment: counters only grow, gauges rise and fall."""

    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    stand_ins: Mapping[str, str] = field(default_factory=dict)


def fetch(url: str) -> str | None:
    """Get a page of metrics; None where there is none."""
    address = url if "//" in url else f"http://{url}"
    if "/" not in address.partition("//")[2].rstrip("/"):
        address = f"{address.rstrip('/')}/metrics"
    try:
        with _open(address, timeout=_PATIENCE) as answer:
            return str(answer.read().decode(errors="replace"))
    except (OSError, HTTPException, ValueError):
        return None


def read_metrics(text: str, models: Sequence[str]) -> Metrics:
    """Read what these models publish, and what Triton publishes of the machine.

    Values of one name are added up, except for shares of a device, which are averaged.

    >>> read_metrics('acme_tokens_total{model="demo",version="1"} 7', ["demo"]).counters
    {'acme_tokens_total': 7.0}
    """
    values: dict[str, list[float]] = {}
    counters: set[str] = set()
    stand_ins: dict[str, str] = {}
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError:
        return Metrics()
    for family, sample in ((each, sample) for each in families for sample in each.samples):
        name, labels = sample.name, sample.labels
        if name == STAND_IN_METRIC and sample.value:
            stand_ins[labels.get("model", "")] = labels.get("instead_of", "")
        # Buckets and quantiles make no sense added up; their sum and count do.
        skipped = bool(labels.keys() & {"le", "quantile"}) or name == STAND_IN_METRIC
        skipped |= name.startswith("nv_") and name not in MACHINE_GAUGES
        if skipped or labels.get("model") not in (None, *models) or not isfinite(sample.value):
            continue
        values.setdefault(name, []).append(sample.value)
        if family.type == "counter" or name.endswith(("_total", "_sum", "_count")):
            counters.add(name)
    found = {name: fmean(v) if name in _SHARES else sum(v) for name, v in values.items()}
    return Metrics(
        {name: value for name, value in found.items() if name in counters},
        {name: value for name, value in found.items() if name not in counters},
        stand_ins,
    )


Snapshot = tuple[Mapping[str, Any], Metrics]
"""Triton's statistics by model, and what is published, at a moment."""


class Observer:
    """Reads the figures of a model and of the models that it is made of."""

    def __init__(self, target: Target) -> None:
        address = parse_url(target.url)
        # Triton's own ports follow one another: HTTP, gRPC, metrics.
        usual = f"http://{address.host}:{address.port + 1}/metrics"
        self.metrics_url = target.metrics_url or usual
        options = [("grpc.enable_http_proxy", 0)]
        self._client = InferenceServerClient(str(address), ssl=address.tls, channel_args=options)
        self._configs = self._read_configs(target.model)

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def look(self) -> Snapshot | None:
        """Read all counters; None where the server keeps none."""
        found = {}
        try:
            for name in self._configs:
                answer = self._client.get_inference_statistics(name, client_timeout=_PATIENCE)
                found[name] = answer.model_stats[0]
        except (InferenceServerException, IndexError):
            return None
        return found, self.read_metrics()

    def read_metrics(self) -> Metrics:
        return read_metrics(fetch(self.metrics_url) or "", list(self._configs))

    def look_after(self, before: Snapshot | None, answered: int) -> Snapshot | None:
        """Read all counters once they hold so many answers.

        Triton counts a batch when all of it is over, which can be well after its last answer was
        sent. Where a count stays below, as of requests that were never taken, it is given up soon.
        """
        deadline = time.monotonic() + _SETTLING
        model, last = next(iter(self._configs)), before
        while True:
            now = self.look()
            if before is None or now is None or time.monotonic() > deadline:
                return now
            counted = _answered(now[0][model]) - _answered(before[0][model])
            if counted >= answered and last and now[1].counters == last[1].counters:
                return now
            last = now
            time.sleep(0.02)

    def difference(
        self, before: Snapshot | None, after: Snapshot | None, gauges: Mapping[str, Gauge]
    ) -> ServerFigures | None:
        if before is None or after is None:
            return None
        (old, was), (new, now) = before, after
        whole, *parts = [_difference(name, old[name], new[name]) for name in new]
        # A part that nobody asked has nothing to tell.
        asked = [part for part in parts if part.requests or part.executions]
        counters = {k: value - was.counters.get(k, 0.0) for k, value in now.counters.items()}
        return ServerFigures((whole, *asked), counters, gauges, self._stand_ins(now))

    def _stand_ins(self, metrics: Metrics) -> dict[str, str]:
        """Name the models that a stand-in answers, and what it stands in for.

        A stand-in says so on ``/metrics``. Where that cannot be reached, Triton's configuration
        still says that Python runs a backend which a plugin here registers a stand-in for. What a
        library runs is nobody's stand-in, even if a page of another server says so.
        """
        registered = {b.name: b.stand_in_for for b in Registry.load().all(Backend)}
        found = {}
        for name, config in self._configs.items():
            python = registered.get(config.backend) if config.runtime == _PYTHON else None
            instead_of = metrics.stand_ins.get(name) or python
            if instead_of and config.runtime in ("", _PYTHON):
                found[name] = instead_of
        return found

    def _read_configs(self, model: str) -> dict[str, Any]:
        """Read the configuration of a model, of an ensemble's steps and of what they ask."""
        try:
            whole = self._client.get_model_config(model, client_timeout=_PATIENCE).config
        except InferenceServerException as error:
            raise UnreachableError(f"{model!r} cannot be asked: {error.message()}") from None
        configs = {model: whole}
        parts = [step.model_name for step in whole.ensemble_scheduling.step]
        parts += whole.parameters[_PARTS].string_value.split() if _PARTS in whole.parameters else []
        for part in parts:
            with suppress(InferenceServerException):
                answer = self._client.get_model_config(part, client_timeout=_PATIENCE)
                configs[part] = answer.config
        return configs


class GaugeSampler:
    """Reads gauges again and again from when it is entered until it is left.

    It is a thread of the process that waits for the load generators, which are processes of their
    own and do not notice.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._seen: list[tuple[float, Mapping[str, float]]] = []
        self._over = Event()
        self._thread = Thread(target=self._look, daemon=True)

    def __enter__(self) -> GaugeSampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        # A page that does not answer must not keep anybody: the thread ends with the process.
        self._thread.join(1.0)

    def between(self, began: float, ended: float) -> dict[str, Gauge]:
        """Describe what was seen often enough in a window of the monotonic clock."""
        values: dict[str, list[float]] = {}
        for at, gauges in list(self._seen):
            for name, value in gauges.items():
                first = began + (_MACHINE_AGE if name in MACHINE_GAUGES else 0.0)
                if first <= at <= ended:
                    values.setdefault(name, []).append(value)
        return {
            name: Gauge(fmean(seen), max(seen))
            for name, seen in values.items()
            if len(seen) >= _FEWEST_LOOKS and max(seen) > 0
        }

    def _look(self) -> None:
        while not self._over.wait(_LOOK):
            at, gauges = time.monotonic(), self._observer.read_metrics().gauges
            self._seen.append((at, gauges))
            if not gauges and len(self._seen) == 1:
                return


def _answered(statistics: Any) -> int:
    stats = statistics.inference_stats
    return int(stats.success.count + stats.fail.count)


def _difference(name: str, before: Any, after: Any) -> ModelFigures:
    old, new = before.inference_stats, after.inference_stats
    times = {what: (getattr(new, what).ns - getattr(old, what).ns) / 1e9 for what in _TIMES}
    earlier = {entry.batch_size: entry.compute_infer.count for entry in before.batch_stats}
    sizes = {entry.batch_size: entry.compute_infer.count for entry in after.batch_stats}
    batches = {size: count - earlier.get(size, 0) for size, count in sizes.items()}
    return ModelFigures(
        model=name,
        requests=_answered(after) - _answered(before),
        inferences=after.inference_count - before.inference_count,
        executions=after.execution_count - before.execution_count,
        batches={str(size): count for size, count in batches.items() if count},
        **times,
    )
