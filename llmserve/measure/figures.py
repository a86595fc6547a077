"""What the server itself says: Triton's statistics, and what models count on ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmserve.client.channel import Endpoint
from llmserve.measure.gauges import Sampler
from llmserve.measure.job import Place
from llmserve.measure.published import fetch, read_page
from llmserve.measure.runs import ModelFigures, Sampled, ServerFigures
from llmserve.measure.standins import find

_PATIENCE = 5.0
_SETTLING = 0.5
_BETWEEN = 0.02
_PARTS = "llmserve.parts"
_TIMES = ("success", "queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True)
class Snapshot:
    """All counters of a moment."""

    models: Mapping[str, Any]
    metrics: Mapping[str, float]
    stand_ins: Mapping[str, str] = field(default_factory=dict)


class Observer:
    """Reads the figures of a model and of its parts: an ensemble's, and what these ask."""

    def __init__(self, place: Place, model: str, metrics_url: str | None = None) -> None:
        import grpc
        from tritonclient.grpc import service_pb2, service_pb2_grpc

        endpoint = Endpoint.make(
            place.url,
            tls=place.tls,
            root_certificates=place.root_certificates,
            headers=place.headers,
        )
        self._messages = service_pb2
        self._metadata = endpoint.metadata
        self._channel = endpoint.open(grpc)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._metrics_url = metrics_url or _usual_metrics(endpoint)
        self._configs = self._read_configs(model)
        self._names = [*self._configs]

    def close(self) -> None:
        """Let go of the connection."""
        self._channel.close()

    def look(self) -> Snapshot | None:
        """Read all counters; None where the server keeps none."""
        import grpc

        models = {}
        try:
            for name in self._names:
                request = self._messages.ModelStatisticsRequest(name=name)
                models[name] = self._ask("ModelStatistics", request).model_stats[0]
        except (grpc.RpcError, IndexError):
            return None
        page = fetch(self._metrics_url) or ""
        return Snapshot(models, read_page(page, self._names).sums, find(self._configs, page))

    def look_after(self, before: Snapshot | None, answered: int) -> Snapshot | None:
        """Read all counters once those of so many answers are in them.

        Triton counts a batch when all of it is over, which can be well after its last answer
        has been sent, and a model tells its own counts when it comes to it. Where a count stays
        below, as of requests that were never taken, it is given up soon.
        """
        deadline = time.monotonic() + _SETTLING
        last = before
        while True:
            now = self.look()
            if before is None or now is None or time.monotonic() > deadline:
                return now
            model = self._names[0]
            there = _counted(now.models[model]) - _counted(before.models[model]) >= answered
            if there and last is not None and now.metrics == last.metrics:
                return now
            last = now
            time.sleep(_BETWEEN)

    def sampler(self) -> Sampler:
        """Give what looks, while a load runs, at what rises and falls."""
        return Sampler(self._metrics_url, self._names)

    def _read_configs(self, model: str) -> dict[str, Any]:
        """Read the configuration of the model and, after it, of all parts that are loaded."""
        own = self._config(model)
        configs = {model: own or self._messages.ModelConfigResponse().config}
        for part in parts_of(configs[model]):
            if found := self._config(part):
                configs[part] = found
        return configs

    def _config(self, name: str) -> Any:
        import grpc

        try:
            return self._ask("ModelConfig", self._messages.ModelConfigRequest(name=name)).config
        except grpc.RpcError:
            return None

    def _ask(self, method: str, request: Any) -> Any:
        return getattr(self._stub, method)(request, timeout=_PATIENCE, metadata=self._metadata)


def parts_of(config: Any) -> list[str]:
    """Name the models that a model is made of: its steps, and what llmserve says beside them."""
    names = [step.model_name for step in config.ensemble_scheduling.step]
    if _PARTS in config.parameters:
        names += config.parameters[_PARTS].string_value.split()
    return list(dict.fromkeys(names))


def difference(
    before: Snapshot | None, after: Snapshot | None, samples: Mapping[str, Sampled] | None = None
) -> ServerFigures | None:
    """Say what happened between two looks; ``samples`` are what was seen in between."""
    if before is None or after is None:
        return None
    models = [
        _model(name, before.models[name], after.models[name])
        for name in after.models
        if name in before.models
    ]
    # A part that nobody asked has nothing to tell.
    asked = [m for at, m in enumerate(models) if not at or m.requests or m.failed or m.executions]
    metrics = {name: value - before.metrics.get(name, 0.0) for name, value in after.metrics.items()}
    return ServerFigures(tuple(asked), metrics, samples or {}, after.stand_ins)


def _counted(statistics: Any) -> int:
    stats = statistics.inference_stats
    return int(stats.success.count + stats.fail.count)


def _model(name: str, before: Any, after: Any) -> ModelFigures:
    old, new = before.inference_stats, after.inference_stats
    times = {what: (getattr(new, what).ns - getattr(old, what).ns) / 1e9 for what in _TIMES}
    earlier = {entry.batch_size: entry.compute_infer.count for entry in before.batch_stats}
    batches = {
        str(entry.batch_size): entry.compute_infer.count - earlier.get(entry.batch_size, 0)
        for entry in after.batch_stats
    }
    return ModelFigures(
        model=name,
        requests=new.success.count - old.success.count,
        failed=new.fail.count - old.fail.count,
        inferences=after.inference_count - before.inference_count,
        executions=after.execution_count - before.execution_count,
        batches={size: count for size, count in batches.items() if count},
        **times,
    )


def _usual_metrics(endpoint: Endpoint) -> str:
    # Triton's own ports follow one another: HTTP, gRPC, metrics.
    return f"http://{endpoint.address.host}:{endpoint.address.port + 1}/metrics"
