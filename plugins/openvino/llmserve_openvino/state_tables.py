"""The states of sequences, for a model that keeps one in some of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from llmserve.graphs import openvino as ov
from llmserve.runtime import Chunk

TABLE = "llmserve_state."
"""How the inputs begin that are tables of states."""
ROWS = (
    "llmserve_state_begins", "llmserve_state_rows", "llmserve_state_row_begins",
    "llmserve_state_past", "llmserve_state_interval",
)  # fmt: skip
"""The inputs that say which rows of the tables are whose, in the order that operations have."""
_LINE = 64
_WHOLE = 1 << 30
"""The operations keep a state now and then, of so many tokens; here only the last is kept."""


def has_states(model: Any) -> bool:
    """Whether a model has tables of states."""
    return any(_is_table(port) for port in model.inputs)


class StateTables:
    """A table for each layer with a row for each of so many sequences, one of zeros, and rows for
    copies within so many bytes."""

    def __init__(self, model: Any, sequences: int, copies_bytes: int = 0) -> None:
        self.tensors: dict[str, Any] = {}
        self._memory: list[Any] = []
        ports = list(filter(_is_table, model.inputs))
        states = [[axis.get_length() for axis in port.partial_shape[1:]] for port in ports]
        sizes = [
            prod(state) * port.element_type.size for state, port in zip(states, ports, strict=True)
        ]
        self.most_copies = copies_bytes // sum(sizes) if ports else 0
        """How many copies there are rows for."""
        rows = 1 + sequences + self.most_copies
        for port, state, size in zip(ports, states, sizes, strict=True):
            memory = zeros(rows * size)
            # The tensor refers to the memory and does not own it.
            self._memory.append(memory.reshape(rows, size))
            shape = ov.Shape([rows, *state])
            self.tensors[port.any_name] = ov.Tensor(memory, shape, port.element_type)
        self._rows: dict[int, int] = {}
        """The row of each state and of each copy, by its number."""
        self._free = list(range(rows - 1, 0, -1))

    def inputs(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Return where the state before each chunk is, and where that after it goes."""
        rows = []
        for chunk in chunks if self.tensors else ():
            row = self._row(chunk.state)
            rows += [row if chunk.start else 0, row]
        return self._inputs(chunks, rows)

    def first(self, chunk: Chunk) -> dict[str, Any]:
        """Return what a pass is given that begins a text and whose state goes to the first row."""
        return self._inputs([chunk], [0, 1])

    def _inputs(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> dict[str, Any]:
        if not self.tensors:
            return {}
        count = len(chunks)
        values = (
            [0, *accumulate(len(chunk.ids) for chunk in chunks)], rows,
            range(0, 2 * count + 1, 2), [chunk.start for chunk in chunks], [_WHOLE] * count,
        )  # fmt: skip
        return {name: np.array(each, np.int32) for name, each in zip(ROWS, values, strict=True)}

    @property
    def form(self) -> str:
        """What the bytes of a state mean: the type and the shape of each part."""
        parts = [
            (name, str(tensor.element_type), list(tensor.shape)[1:])
            for name, tensor in self.tensors.items()
        ]
        return str(parts)

    def read(self, state: int) -> bytes:
        """Return a copy of what a state is now."""
        row = self._row(state)
        return b"".join(memory[row].tobytes() for memory in self._memory)

    def write(self, state: int, content: bytes) -> bool:
        """Have a state be what was read from one; return whether it has the right size."""
        if len(content) != sum(memory.shape[1] for memory in self._memory):
            return False
        row, at = self._row(state), 0
        for memory in self._memory:
            memory[row] = np.frombuffer(content, np.uint8, memory.shape[1], at)
            at += memory.shape[1]
        return True

    def copy(self, state: int, copy: int) -> None:
        """Keep what a state is now under another number."""
        row, other = self._row(state), self._row(copy)
        for memory in self._memory:
            memory[other] = memory[row]

    def forget(self, state: int) -> None:
        """Free the row of a state or a copy."""
        if (row := self._rows.pop(state, None)) is not None:
            self._free.append(row)

    def _row(self, state: int) -> int:
        row = self._rows.get(state)
        if row is None:
            row = self._rows[state] = self._free.pop()
        return row


def zeros(count: int) -> Any:
    """Return bytes whose memory the operating system gives when they are first written.

    They are zeros, because a kernel may multiply by zero what is not to count, and aligned to the
    lines of a processor's cache.
    """
    memory = np.zeros(count + _LINE, np.uint8)
    first = -memory.ctypes.data % _LINE
    return memory[first : first + count]


def _is_table(port: Any) -> bool:
    return str(port.any_name).startswith(TABLE)
