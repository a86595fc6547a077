"""Graphs behind Triton's requests, with the implicit state of sequences.

It does as Triton's own backends do: requests whose tensors have the same shapes run as one batch,
nothing is padded, and a sequence's state goes from each of its requests to the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime import tensors_of
from llmserve_standins.notice import notice

Array = npt.NDArray[Any]
START, END = 1, 2


@dataclass(frozen=True)
class Graph:
    """A loaded graph: what it is for the log, what it takes, and how its outputs are computed."""

    what: str
    inputs: frozenset[str]
    run: Callable[[Mapping[str, Array], Sequence[str]], Sequence[Array]]


@dataclass(frozen=True)
class _Request:
    raw: Any
    feeds: Mapping[str, Array]
    sequence: int
    flags: int

    def shapes(self) -> Hashable:
        return tuple(sorted((name, array.shape[1:]) for name, array in self.feeds.items()))


class ServedGraph:
    """A graph as Triton's Python backend serves it; a stand-in says how one is loaded."""

    usual_file: str
    """What the graph's file is called where the configuration does not say."""
    device: int | None
    """The GPU's number, None for the CPU."""

    def load(self, file: Path) -> Graph:
        raise NotImplementedError

    def initialize(self, args: Mapping[str, str]) -> None:
        import triton_python_backend_utils as pb_utils

        self.start(args, pb_utils)

    def start(self, args: Mapping[str, str], pb_utils: Any) -> None:
        self.config = config = json.loads(args["model_config"])
        self.home = Path(args["model_repository"])
        gpu = args["model_instance_kind"] == "GPU"
        self.device = int(args["model_instance_device_id"]) if gpu else None
        name = config.get("default_model_filename") or self.usual_file
        self._graph = graph = self.load(self.home / args["model_version"] / name)
        sequences = config.get("sequence_batching") or {}
        self._pb = pb_utils
        self._batched = int(config["max_batch_size"]) > 0
        self._idle = int(sequences.get("max_sequence_idle_microseconds") or 0) / 1_000_000
        states = sequences.get("state") or []
        self._empty = {state["input_name"]: _first(state) for state in states}
        self._presents = [state["output_name"] for state in states]
        self._outputs = {out["name"]: numpy_type(out["data_type"]) for out in config["output"]}
        self.kept: dict[int, tuple[float, Mapping[str, Array]]] = {}
        """When each sequence was last seen, and the state it is in."""
        original = f"Triton's backend {config.get('backend') or config.get('platform')}"
        self._notice = notice(pb_utils, config["name"], original, f"on {graph.what}")

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer every request; those of equal shapes run together."""
        now = time.monotonic()
        for key in [key for key, (seen, _) in self.kept.items() if now - seen > self._idle]:
            del self.kept[key]
        groups: dict[Hashable, list[_Request]] = {}
        for raw in requests:
            request = self._read(raw)
            group = request.shapes() if self._batched else id(raw)
            groups.setdefault(group, []).append(request)
        answers: dict[int, Any] = {}
        for together in groups.values():
            try:
                responses = self._run(together, now)
            except Exception as error:
                problem = self._pb.TritonError(f"{type(error).__name__}: {error}".splitlines()[0])
                responses = [self._pb.InferenceResponse([], problem) for _ in together]
            answers.update({id(one.raw): r for one, r in zip(together, responses, strict=True)})
        return [answers[id(raw)] for raw in requests]

    def finalize(self) -> None:
        self._notice.clear()

    def _read(self, raw: Any) -> _Request:
        feeds = {k: values for k, values in tensors_of(raw).items() if k in self._graph.inputs}
        key, flags = raw.correlation_id(), raw.flags()
        if flags & START:
            self.kept.pop(key, None)
        _, state = self.kept.get(key, (0.0, self._empty))
        return _Request(raw, {**feeds, **state}, key, flags)

    def _run(self, requests: Sequence[_Request], now: float) -> list[Any]:
        feeds = {
            name: np.concatenate([request.feeds[name] for request in requests])
            for name in requests[0].feeds
        }
        wanted = [*self._outputs, *self._presents]
        values = dict(zip(wanted, self._graph.run(feeds, wanted), strict=True))
        responses, first = [], 0
        for request in requests:
            rows = len(next(iter(request.feeds.values())))
            part = slice(first, first + rows) if self._batched else slice(None)
            first += rows
            if request.flags & END:
                self.kept.pop(request.sequence, None)
            elif self._empty:
                presents = (values[name][part] for name in self._presents)
                self.kept[request.sequence] = now, dict(zip(self._empty, presents, strict=True))
            responses.append(self._response(request, values, part))
        return responses

    def _response(self, request: _Request, values: Mapping[str, Array], part: slice) -> Any:
        wanted = request.raw.requested_output_names() or self._outputs
        return self._pb.InferenceResponse([
            self._pb.Tensor(name, np.ascontiguousarray(values[name][part].astype(kind, copy=False)))
            for name, kind in self._outputs.items()
            if name in wanted
        ])  # fmt: skip


def _first(state: Mapping[str, Any]) -> Array:
    """Return what a state is before its first request."""
    initial = (state.get("initial_state") or [{}])[0]
    if "data_file" in initial:
        raise RuntimeError("llmserve's stand-in reads no initial state from a file")
    # As Triton does: an open dimension is 1 where nothing else is said.
    sizes = [max(int(size), 1) for size in initial.get("dims") or state["dims"]]
    return np.zeros([1, *sizes], numpy_type(state["data_type"]))


def numpy_type(name: str) -> npt.DTypeLike:
    """Give numpy's type for one of a configuration."""
    try:
        return np.dtype(name.removeprefix("TYPE_").lower().replace("fp", "float"))
    except TypeError:
        raise RuntimeError(
            f"llmserve's stand-in serves no {name}: use NVIDIA's container"
        ) from None
