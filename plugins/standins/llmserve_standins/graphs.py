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

from llmserve_standins.notice import Notice

Array = npt.NDArray[Any]
START, END = 1, 2


@dataclass(frozen=True)
class Place:
    """Where a model lies and where it is to run, from what Triton hands to ``initialize``."""

    home: Path
    version: str
    config: Mapping[str, Any]
    device: int | None
    """The GPU's number, None for the CPU."""

    @classmethod
    def read(cls, args: Mapping[str, str]) -> Place:
        gpu = args["model_instance_kind"] == "GPU"
        return cls(
            home=Path(args["model_repository"]),
            version=args["model_version"],
            config=json.loads(args["model_config"]),
            device=int(args["model_instance_device_id"]) if gpu else None,
        )

    def file(self, usual: str) -> Path:
        return self.home / self.version / (self.config.get("default_model_filename") or usual)


@dataclass(frozen=True)
class Graph:
    """A loaded graph: what it is for the log, what it takes, and how its outputs are computed."""

    what: str
    inputs: frozenset[str]
    run: Callable[[Mapping[str, Array], Sequence[str]], Sequence[Array]]


class _State:
    def __init__(self, block: Mapping[str, Any]) -> None:
        self.input: str = block["input_name"]
        self.output: str = block["output_name"]
        initial = (block.get("initial_state") or [{}])[0]
        if "data_file" in initial:
            raise RuntimeError("llmserve's stand-in reads no initial state from a file")
        # As Triton does: an open dimension is 1 where nothing else is said.
        sizes = [max(int(size), 1) for size in initial.get("dims") or block["dims"]]
        self.first: Array = np.zeros([1, *sizes], numpy_type(block["data_type"]))


@dataclass(frozen=True)
class _Request:
    raw: Any
    sequence: int
    flags: int
    feeds: Mapping[str, Array]

    def shapes(self) -> Hashable:
        return tuple(sorted((name, array.shape[1:]) for name, array in self.feeds.items()))


class GraphModel:
    def __init__(self, graph: Graph, place: Place, pb_utils: Any) -> None:
        config = place.config
        sequences = config.get("sequence_batching") or {}
        self._graph = graph
        self._pb = pb_utils
        self._batched = int(config["max_batch_size"]) > 0
        self._has_sequences = bool(sequences)
        self._idle = int(sequences.get("max_sequence_idle_microseconds") or 0) / 1_000_000
        self._states = [_State(block) for block in sequences.get("state") or []]
        self._outputs = {out["name"]: numpy_type(out["data_type"]) for out in config["output"]}
        self.kept: dict[int, tuple[float, dict[str, Array]]] = {}
        """When each sequence was last seen, and the state it is in."""
        original = f"Triton's backend {config.get('backend') or config.get('platform')}"
        self._notice = Notice(pb_utils, config["name"], original, f"on {graph.what}")

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
        self._notice.close()

    def _read(self, raw: Any) -> _Request:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in raw.inputs()}
        feeds = {name: array for name, array in inputs.items() if name in self._graph.inputs}
        if not self._has_sequences:
            return _Request(raw, 0, 0, feeds)
        key, flags = raw.correlation_id(), raw.flags()
        if flags & START:
            self.kept.pop(key, None)
        _, state = self.kept.get(key, (0.0, {one.input: one.first for one in self._states}))
        return _Request(raw, key, flags, {**feeds, **state})

    def _run(self, requests: Sequence[_Request], now: float) -> list[Any]:
        feeds = {
            name: np.concatenate([request.feeds[name] for request in requests])
            for name in requests[0].feeds
        }
        wanted = [*self._outputs, *(state.output for state in self._states)]
        values = dict(zip(wanted, self._graph.run(feeds, wanted), strict=True))
        responses, first = [], 0
        for at, request in enumerate(requests):
            if request.flags & END:
                self.kept.pop(request.sequence, None)
            elif self._states:
                state = {one.input: values[one.output][at : at + 1] for one in self._states}
                self.kept[request.sequence] = now, state
            rows = len(next(iter(request.feeds.values()))) if self._batched else None
            part = slice(first, first + rows) if rows is not None else slice(None)
            responses.append(self._response(request, values, part))
            first += rows or 0
        return responses

    def _response(self, request: _Request, values: Mapping[str, Array], part: slice) -> Any:
        wanted = request.raw.requested_output_names() or self._outputs
        return self._pb.InferenceResponse([
            self._pb.Tensor(name, np.ascontiguousarray(values[name][part].astype(kind, copy=False)))
            for name, kind in self._outputs.items()
            if name in wanted
        ])  # fmt: skip


class ServedGraph(GraphModel):
    """A graph as Triton's Python backend serves it; a backend says how one is loaded."""

    def __init__(self) -> None:
        """Triton calls this first, and ``initialize`` with what there is to know."""

    def initialize(self, args: Mapping[str, str]) -> None:
        import triton_python_backend_utils as pb_utils

        place = Place.read(args)
        super().__init__(self.load(place), place, pb_utils)

    def load(self, place: Place) -> Graph:
        raise NotImplementedError


def numpy_type(name: str) -> npt.DTypeLike:
    """Give numpy's type for one of a configuration."""
    try:
        return np.dtype(name.removeprefix("TYPE_").lower().replace("fp", "float"))
    except TypeError:
        raise RuntimeError(
            f"llmserve's stand-in serves no {name}: use NVIDIA's container"
        ) from None
