"""What the engine asks of a runner, which keeps a model with its cache and computes its passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Chunk:
    """Tokens of one sequence that a pass computes; those before them are in the cache already.

    What the cache holds of the token at ``position`` belongs to row ``position % page_size`` of
    page ``pages[position // page_size]``. Pages may be shared with sequences that begin alike, and
    there may be more of them than the chunk needs.
    """

    ids: list[int]
    start: int
    """How many tokens of the sequence precede the chunk."""
    pages: list[int]
    rows: int = 1
    """Of how many of its last tokens the logits are needed; none in the middle of a prompt."""
    adapter: str = ""
    """The key of the adapter that the sequence is computed with, which is loaded."""
    state: int = 0
    """The number of the sequence's state, if the runner keeps states."""

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)

    @property
    def single(self) -> bool:
        return len(self.ids) == 1


class Logits(Protocol):
    """The rows that the chunks of a pass need, in their order, wherever they are in memory."""

    def likeliest(self) -> Sequence[int]:
        """Return the likeliest token of every row."""

    def row(self, index: int) -> npt.NDArray[Any]:
        """Return a row's scores in float32, one for each token of the vocabulary."""


class ArrayLogits:
    """Logits that numpy has in memory, ``[rows, vocabulary]``."""

    def __init__(self, rows: npt.NDArray[Any]) -> None:
        self._rows = rows

    def likeliest(self) -> list[int]:
        tokens: list[int] = self._rows.argmax(axis=-1).tolist()
        return tokens

    def row(self, index: int) -> npt.NDArray[Any]:
        row: npt.NDArray[Any] = self._rows[index].astype(np.float32, copy=False)
        return row


class Runner(Protocol):
    """Computes passes of a model whose cache is ``page_count`` pages of ``page_size`` tokens.

    It knows no requests and no sequences, only chunks of tokens and pages. What it wrote to a page
    must stay there until a later pass writes there again.
    """

    page_size: int
    page_count: int
    accepts_runs: bool
    """Whether several tokens of a sequence in a pass take hardly longer than one: tokens that a
    constraint forces are then computed together."""

    def run(self, chunks: Sequence[Chunk]) -> Logits:
        """Compute the chunks in one pass, each token seeing those of its own sequence up to it.

        Chunks of one token come first. If this raises, the engine may pass the same chunks again.
        """


@runtime_checkable
class StateRunner(Runner, Protocol):
    """A runner that keeps a state for each sequence, and cannot go back to an earlier one.

    A chunk names its sequence's state, which a pass changes. A chunk with ``start`` 0 begins with
    none; the others follow in order and once each, after what was computed or copied. If a pass
    raises, all its sequences begin again, at a copy or without one.
    """

    most_copies: int
    """How many copies the engine may keep, to share beginnings and to return to; 0 for none."""

    def copy(self, state: int, copy: int) -> None:
        """Keep what a state is now under another number, which is new."""

    def forget(self, state: int) -> None:
        """Free a state or a copy, if there is one of this number."""


@runtime_checkable
class PageRunner(Runner, Protocol):
    """A runner that gives out what its pages hold, and takes it back, also in a later process."""

    @property
    def page_form(self) -> str:
        """What the bytes of a page mean, and all that is not of the model's files and decides it:
        libraries, types, shapes. Empty if pages cannot be given out."""

    def read_page(self, page: int) -> bytes:
        """Return a copy of what a page holds."""

    def write_page(self, page: int, content: bytes) -> bool:
        """Put into a page what was read from one; return whether it has the right size."""
