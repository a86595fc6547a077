"""Serves graphs to Triton's requests, with the implicit state of sequences.

It behaves like Triton's own backends: requests whose inputs have the same shapes run as one batch,
nothing is padded, and a sequence's state is kept from one of its requests to the next. What those
backends refuse is refused here too, and so is what they would compute wrongly without a word.
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
    """A loaded graph: its description for the log, its inputs, and a function that runs it."""

    description: str
    inputs: frozenset[str]
    run: Callable[[Mapping[str, Array], Sequence[str]], Sequence[Array]]


@dataclass(frozen=True)
class _Request:
    raw: Any
    feeds: Mapping[str, Array]
    sequence: int
    flags: int
    shapes: Hashable
    """The shapes of its inputs; Triton forms batches by them, and ignores the shapes of states."""


class ServedGraph:
    """A graph served by Triton's Python backend; each stand-in implements ``load``."""

    default_file: str
    """The name of the graph's file if the configuration does not set one."""
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
        name = config.get("default_model_filename") or self.default_file
        self._graph = graph = self.load(self.home / args["model_version"] / name)
        sequences = config.get("sequence_batching") or {}
        self._pb = pb_utils
        self._batched = int(config["max_batch_size"]) > 0
        self._max_idle = int(sequences.get("max_sequence_idle_microseconds") or 0) / 1_000_000
        states = sequences.get("state") or []
        self._initial = {state["input_name"]: _initial_state(state) for state in states}
        self._state_outputs = [state["output_name"] for state in states]
        self._outputs = [output["name"] for output in config["output"]]
        declared = [(output["name"], output["data_type"]) for output in config["output"]]
        declared += [(state["output_name"], state["data_type"]) for state in states]
        self._types = {name: (kind, np.dtype(numpy_type(kind))) for name, kind in declared}
        self.states: dict[int, tuple[float, Mapping[str, Array]]] = {}
        """The time of each sequence's last request, and its current state."""
        original = f"Triton's backend {config.get('backend') or config.get('platform')}"
        self._notice = notice(pb_utils, config["name"], original, f"on {graph.description}")

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer every request; requests of equal shapes run together."""
        now = time.monotonic()
        for key in [key for key, (seen, _) in self.states.items() if now - seen > self._max_idle]:
            del self.states[key]
        groups: dict[Hashable, list[_Request]] = {}
        for raw in requests:
            request = self._read(raw)
            group = request.shapes if self._batched else id(raw)
            groups.setdefault(group, []).append(request)
        by_request: dict[int, Any] = {}
        for batch in groups.values():
            try:
                responses = self._run(batch, now)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
                # An error that several responses share reaches all but one as random bytes.
                errors = [self._pb.TritonError(problem) for _ in batch]
                responses = [self._pb.InferenceResponse([], error) for error in errors]
            pairs = zip(batch, responses, strict=True)
            by_request.update({id(request.raw): response for request, response in pairs})
        return [by_request[id(raw)] for raw in requests]

    def finalize(self) -> None:
        self._notice.clear()

    def _read(self, raw: Any) -> _Request:
        feeds = {k: values for k, values in tensors_of(raw).items() if k in self._graph.inputs}
        key, flags = raw.correlation_id(), raw.flags()
        if flags & START:
            self.states.pop(key, None)
        _, state = self.states.get(key, (0.0, self._initial))
        shapes = tuple(sorted((name, array.shape[1:]) for name, array in feeds.items()))
        return _Request(raw, {**feeds, **state}, key, flags, shapes)

    def _run(self, requests: Sequence[_Request], now: float) -> list[Any]:
        feeds = {name: _joined(name, requests) for name in requests[0].feeds}
        names = [*self._outputs, *self._state_outputs]
        values = dict(zip(names, self._graph.run(feeds, names), strict=True))
        for name, (declared, kind) in self._types.items():
            if values[name].dtype != kind:
                raise RuntimeError(
                    f"the configuration declares {name} as {declared}, and the graph gives "
                    f"{values[name].dtype}: declare what it gives"
                )
        responses, start = [], 0
        for request in requests:
            count = len(next(iter(request.feeds.values())))
            rows = slice(start, start + count) if self._batched else slice(None)
            start += count
            if request.flags & END:
                self.states.pop(request.sequence, None)
            elif self._initial:
                state = (values[name][rows] for name in self._state_outputs)
                self.states[request.sequence] = now, dict(zip(self._initial, state, strict=True))
            responses.append(self._response(request, values, rows))
        return responses

    def _response(self, request: _Request, values: Mapping[str, Array], rows: slice) -> Any:
        requested = request.raw.requested_output_names() or self._outputs
        return self._pb.InferenceResponse([
            self._pb.Tensor(name, np.ascontiguousarray(values[name][rows]))
            for name in self._outputs
            if name in requested
        ])  # fmt: skip


def _joined(name: str, requests: Sequence[_Request]) -> Array:
    """Return a tensor of all requests.

    Triton's backends take the first request's shape for all: ONNX Runtime refuses a batch that is
    shorter than that, and otherwise both compute with the values of other positions and rows.
    """
    arrays = [request.feeds[name] for request in requests]
    if len(shapes := {array.shape[1:] for array in arrays}) > 1:
        found = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise RuntimeError(
            f"a batch has sequences whose state {name} has the shapes {found}: Triton forms "
            "batches by the shapes of inputs, so give the graph an input that is as long as its "
            "state"
        )
    return np.concatenate(arrays)


def sequence_inputs(config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of a configuration's control inputs, and of its states' inputs."""
    sequences = config.get("sequence_batching") or {}
    controls = [tensor["name"] for tensor in sequences.get("control_input") or []]
    return controls, [state["input_name"] for state in sequences.get("state") or []]


def check_input_count(config: Mapping[str, Any], read: int) -> None:
    """Refuse a configuration that declares more or fewer inputs than the graph reads."""
    required = [tensor for tensor in config["input"] if not tensor.get("optional")]
    declared = len(required) + sum(map(len, sequence_inputs(config)))
    if declared != read:
        raise RuntimeError(
            f"the configuration of {config['name']} declares {declared} inputs, states and "
            f"controls included, and the graph reads {read}"
        )


def _initial_state(state: Mapping[str, Any]) -> Array:
    initial = (state.get("initial_state") or [{}])[0]
    if "data_file" in initial:
        raise RuntimeError("llmserve's stand-in does not read initial states from files")
    # As in Triton, an open dimension is 1 unless dims are set.
    sizes = [max(int(size), 1) for size in initial.get("dims") or state["dims"]]
    return np.zeros([1, *sizes], numpy_type(state["data_type"]))


def numpy_type(name: str) -> npt.DTypeLike:
    """Return numpy's type for a type of Triton's configuration."""
    try:
        return np.dtype(name.removeprefix("TYPE_").lower().replace("fp", "float"))
    except TypeError:
        raise RuntimeError(
            f"llmserve's stand-in does not support {name}: use NVIDIA's container"
        ) from None
