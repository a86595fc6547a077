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
    """A table for each layer with a row for each of so many sequences, and one of zeros."""

    def __init__(self, model: Any, sequences: int) -> None:
        self.tensors: dict[str, Any] = {}
        self._memory: list[Any] = []
        for port in filter(_is_table, model.inputs):
            state = [axis.get_length() for axis in port.partial_shape[1:]]
            shape, kind = ov.Shape([1 + sequences, *state]), port.element_type
            memory = zeros(prod(shape) * kind.size)
            # The tensor refers to the memory and does not own it.
            self._memory.append(memory)
            self.tensors[port.any_name] = ov.Tensor(memory, shape, kind)
        self._rows: dict[int, int] = {}
        self._free = list(range(sequences, 0, -1))

    def inputs(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Return where the state before each chunk is, and where that after it goes."""
        if not self.tensors:
            return {}
        rows = []
        for chunk in chunks:
            page = chunk.pages[0]
            row = self._rows.get(page)
            if row is None:
                row = self._rows[page] = self._free.pop()
            rows += [row if chunk.start else 0, row]
        count = len(chunks)
        values = (
            [0, *accumulate(len(chunk.ids) for chunk in chunks)], rows,
            range(0, 2 * count + 1, 2), [chunk.start for chunk in chunks], [_WHOLE] * count,
        )  # fmt: skip
        return {name: np.array(each, np.int32) for name, each in zip(ROWS, values, strict=True)}

    def forget(self, page: int) -> None:
        """Free the row of the sequence whose first page this was."""
        if (row := self._rows.pop(page, None)) is not None:
            self._free.append(row)


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
