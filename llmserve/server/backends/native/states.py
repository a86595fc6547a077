"""Implicit state: what each sequence's last request left for its next one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.server.backends.native.engine import Array, Engine
from llmserve.server.backends.native.types import dtype_of


@dataclass(frozen=True)
class State:
    """One ``state`` block of a configuration, and what a sequence begins with."""

    taken: str
    given: str
    first: Array

    @classmethod
    def read(cls, block: Mapping[str, Any], home: Path) -> State:
        """Read a block as Triton does: an open dimension is 1 where nothing else is said."""
        kind = dtype_of(block["data_type"])
        initial = (block.get("initial_state") or [{}])[0]
        dims = [int(size) for size in initial.get("dims") or block["dims"]]
        shape = [1, *(1 if size < 0 else size for size in dims)]
        first = np.zeros(shape, kind)
        if initial.get("data_file"):
            raw = (home / "initial_state" / initial["data_file"]).read_bytes()
            first = np.frombuffer(raw, kind)[: first.size].reshape(shape)
        return cls(block["input_name"], block["output_name"], first)


class _Batch:
    """What one execution gave: values with a row for each of its sequences."""

    def __init__(self, keys: Sequence[Hashable], values: Mapping[str, Any]) -> None:
        self.keys = tuple(keys)
        self.values = values


class States:
    """The state of every sequence under way.

    It stays in the batch in which it was made, so that as long as the same sequences come
    together nothing is taken apart or copied.
    """

    def __init__(self, states: Sequence[State], engine: Engine, idle_seconds: float) -> None:
        self._states = states
        self._engine = engine
        self._idle = idle_seconds
        self._places: dict[Hashable, tuple[_Batch, int]] = {}
        self._seen: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._places)

    def shapes(self, key: Hashable) -> tuple[Any, ...]:
        """Return what must be equal of the states of one batch."""
        if key not in self._places:
            return tuple(state.first.shape[1:] for state in self._states)
        values = self._places[key][0].values
        return tuple(self._engine.shape(values[state.given])[1:] for state in self._states)

    def take(self, keys: Sequence[Hashable]) -> dict[str, Any]:
        """Return the values that the graph is fed with for these sequences."""
        if not self._states:
            return {}
        batch = self._places[keys[0]][0] if keys[0] in self._places else None
        if batch is not None and batch.keys == tuple(keys) and self._are_of(batch, keys):
            return {state.taken: batch.values[state.given] for state in self._states}
        return {state.taken: self._engine.join(self._rows(state, keys)) for state in self._states}

    def keep(self, keys: Sequence[Hashable], values: Mapping[str, Any], now: float) -> None:
        """Take what an execution left."""
        if self._states:
            batch = _Batch(keys, {state.given: values[state.given] for state in self._states})
            for row, key in enumerate(keys):
                self._places[key] = batch, row
                self._seen[key] = now

    def drop(self, key: Hashable) -> None:
        """Forget a sequence: it has ended, or begins anew."""
        self._places.pop(key, None)
        self._seen.pop(key, None)

    def sweep(self, now: float) -> None:
        """Forget what Triton has given up without a word."""
        for key in [key for key, seen in self._seen.items() if now - seen > self._idle]:
            self.drop(key)

    def _are_of(self, batch: _Batch, keys: Sequence[Hashable]) -> bool:
        return all(self._places.get(key, (None,))[0] is batch for key in keys)

    def _rows(self, state: State, keys: Sequence[Hashable]) -> list[Any]:
        rows = []
        for key in keys:
            if key in self._places:
                batch, row = self._places[key]
                rows.append(self._engine.row(batch.values[state.given], row))
            else:
                rows.append(self._engine.row(self._engine.value(state.first), 0))
        return rows
