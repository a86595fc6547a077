"""What the engine asks of a runner, which keeps a model with its cache and computes its passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Embedded:
    """Tokens of a prompt that stand for something that is no text, such as an image: the runner
    computes a row of embeddings for each, in place of those that the tokens have."""

    start: int
    """How many tokens of the prompt precede them."""
    count: int
    digest: bytes
    """Of all that the rows are made from: what is computed of others with another is not shared."""
    source: Any
    """What the runner makes the rows from, as often as it needs them."""
    is_whole: bool = False
    """Whether these tokens see each other, also those that follow: no chunk ends among them."""
    positions: npt.NDArray[np.int64] | None = None
    """Where the model takes them to be, ``[axes, count]``, from the first one's position on: of an
    image in the model's grid, a token has several. None if they follow one another as a text."""
    in_windows: bool = False
    """Whether they see those that follow only in the layers that look back over a window."""

    @property
    def stop(self) -> int:
        return self.start + self.count

    @cached_property
    def fewer(self) -> int:
        """How many fewer positions they take than they are: what follows them is so much nearer."""
        return 0 if self.positions is None else self.count - 1 - int(self.positions.max())


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
    embedded: Sequence[Embedded] = ()
    """What some of its tokens stand for; of the first and the last perhaps only a part."""
    fewer: int = 0
    """How many fewer positions than tokens all take that is embedded and ends before the chunk."""

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)

    @property
    def single(self) -> bool:
        return len(self.ids) == 1

    def wholes(self) -> list[Embedded]:
        """Return what its tokens stand for that see each other, also those that follow."""
        return [part for part in self.embedded if part.is_whole]

    def replaced(self) -> Iterator[tuple[Embedded, slice, slice]]:
        """Yield what tokens of the chunk stand for: which of its rows are for which of them."""
        for part in self.embedded:
            start, stop = max(part.start, self.start), min(part.stop, self.stop)
            of_part = slice(start - part.start, stop - part.start)
            yield part, of_part, slice(start - self.start, stop - self.start)

    def positions(self) -> npt.NDArray[np.int64] | None:
        """Return where the model takes its tokens to be, ``[axes, tokens]``; None if they follow
        one another from ``start - fewer`` on, as all do that stand for no image in a grid."""
        axes = [len(each.positions) for each in self.embedded if each.positions is not None]
        if not axes:
            return None
        found = np.tile(np.arange(self.start, self.stop) - self.fewer, (axes[0], 1))
        fewer = self.fewer
        for part, of_part, of_chunk in self.replaced():
            if part.positions is not None:
                found[:, of_chunk] = part.start - fewer + part.positions[:, of_part]
                found[:, of_chunk.stop :] -= part.fewer
                fewer += part.fewer
        return found


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
        """Compute the chunks in one pass, each token seeing those of its own sequence up to it, and
        all that are embedded as a whole with it.

        Chunks of one token come first. If this raises, the engine may pass the same chunks again.
        """


@runtime_checkable
class StateRunner(Runner, Protocol):
    """A runner that keeps a state for each sequence, and cannot go back to an earlier one.

    A chunk names its sequence's state, which a pass changes. A chunk with ``start`` 0 begins with
    none; the others follow in order and once each, after what was computed, copied or written. If
    a pass raises, all its sequences begin again, at a copy or without one.
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


@runtime_checkable
class StatePageRunner(StateRunner, PageRunner, Protocol):
    """A runner with states that gives these out as well. ``page_form`` says what they mean too.

    Of a model that has nothing but states, pages hold no bytes.
    """

    def read_state(self, state: int) -> bytes:
        """Return a copy of what a state is now; no bytes if it has another form than others."""

    def write_state(self, state: int, content: bytes) -> bool:
        """Have a state be what was read from one, if it has the right size; return whether it has.
        If not, it is what it was."""
