"""From Triton's requests to a graph and back."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.runtime.stage import tensors_of
from llmserve.server.backends.native.engine import Array, Engine
from llmserve.server.backends.native.states import State, States
from llmserve.server.backends.native.types import dtype_of
from llmserve.server.backends.telling import Notice

START, END = 1, 2


@dataclass(frozen=True)
class Place:
    """Where a model lies and where it shall run."""

    home: Path
    version: str
    config: Mapping[str, Any]
    device: int | None
    """The GPU's number, None for the CPU."""

    @classmethod
    def read(cls, args: Mapping[str, str]) -> Place:
        """Read what Triton hands to ``initialize``."""
        gpu = args["model_instance_kind"] == "GPU"
        return cls(
            home=Path(args["model_repository"]),
            version=args["model_version"],
            config=json.loads(args["model_config"]),
            device=int(args["model_instance_device_id"]) if gpu else None,
        )

    def file(self, usual: str) -> Path:
        """Return the model's file, which the configuration can call otherwise."""
        return self.home / self.version / (self.config.get("default_model_filename") or usual)


@dataclass(frozen=True)
class _Item:
    raw: Any
    key: Any
    flags: int
    inputs: Mapping[str, Array]


class Serving:
    """Runs a graph for batches of requests, with the state of their sequences."""

    def __init__(self, engine: Engine, place: Place, pb_utils: Any) -> None:
        config = place.config
        sequence = config.get("sequence_batching") or {}
        states = [State.read(block, place.home) for block in sequence.get("state") or []]
        idle = int(sequence.get("max_sequence_idle_microseconds") or 0) / 1_000_000
        self._engine = engine
        self._pb = pb_utils
        self._batched = int(config["max_batch_size"]) > 0
        self._sequenced = bool(sequence)
        self._states = States(states, engine, idle)
        self._outputs = {out["name"]: dtype_of(out["data_type"]) for out in config["output"]}
        self._asked = [*self._outputs, *(state.given for state in states)]
        backend = config.get("backend") or config.get("platform")
        self._notice = Notice(
            pb_utils, config["name"], f"Triton's backend {backend}", f"on {engine.name}"
        )

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer every request; those of equal shapes run together."""
        now = time.monotonic()
        self._states.sweep(now)
        items = [self._item(raw) for raw in requests]
        answers: dict[int, Any] = {}
        for group in self._groups(items):
            for at, answer in zip(group, self._run([items[at] for at in group], now), strict=True):
                answers[at] = answer
        return [answers[at] for at in range(len(items))]

    def close(self) -> None:
        """Let go of what is kept on the server."""
        self._notice.close()

    def _item(self, raw: Any) -> _Item:
        inputs = {n: t for n, t in tensors_of(raw).items() if n in self._engine.inputs}
        key, flags = (raw.correlation_id(), raw.flags()) if self._sequenced else (id(raw), 0)
        if flags & START:
            self._states.drop(key)
        return _Item(raw, key, flags, inputs)

    def _groups(self, items: Sequence[_Item]) -> list[list[int]]:
        if not self._batched:
            return [[at] for at in range(len(items))]
        groups: dict[Any, list[int]] = {}
        # In the order of their sequences, whichever way they came: so batches stay the same.
        for at in sorted(range(len(items)), key=lambda at: str(items[at].key)):
            item = items[at]
            shapes = tuple(sorted((n, t.shape[1:]) for n, t in item.inputs.items()))
            held = self._states.shapes(item.key)
            groups.setdefault((shapes, held), []).append(at)
        return list(groups.values())

    def _run(self, items: Sequence[_Item], now: float) -> list[Any]:
        keys = [item.key for item in items]
        try:
            feeds = {
                name: self._engine.value(
                    np.concatenate([item.inputs[name] for item in items])
                    if self._batched
                    else items[0].inputs[name]
                )
                for name in items[0].inputs
            }
            values = self._engine.run({**feeds, **self._states.take(keys)}, self._asked)
        except Exception as error:
            told = self._pb.TritonError(f"{type(error).__name__}: {error}".splitlines()[0])
            return [self._pb.InferenceResponse([], told) for _ in items]
        self._states.keep(keys, values, now)
        for item in items:
            if item.flags & END:
                self._states.drop(item.key)
        return self._responses(items, values)

    def _responses(self, items: Sequence[_Item], values: Mapping[str, Any]) -> list[Any]:
        arrays = {
            name: self._engine.array(values[name]).astype(kind, copy=False)
            for name, kind in self._outputs.items()
        }
        responses, first = [], 0
        for item in items:
            rows = next(iter(item.inputs.values())).shape[0] if self._batched else None
            part = slice(first, first + rows) if rows is not None else slice(None)
            wanted = item.raw.requested_output_names() or arrays
            responses.append(
                self._pb.InferenceResponse(
                    [
                        self._pb.Tensor(name, np.ascontiguousarray(array[part]))
                        for name, array in arrays.items()
                        if name in wanted
                    ]
                )
            )
            first += rows or 0
        return responses
