"""Where in the cache each sequence lives. Nothing here knows about tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GRAIN = 16


@dataclass(frozen=True, order=True)
class Extent:
    """A stretch of neighbouring places in the cache, one place per token."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        """The first place behind it."""
        return self.start + self.size


def rounded(tokens: int) -> int:
    """Return how many places that many tokens are given.

    Sequences of about the same length get the same size, so that neighbours lie at even
    distances and attention can read several of them as one tensor.
    """
    return -(-tokens // GRAIN) * GRAIN


class Arena:
    """A bounded row of places, handed out in extents: the lowest gap that is wide enough."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: list[Extent] = []

    @property
    def used(self) -> int:
        """How many places are taken."""
        return sum(extent.size for extent in self._taken)

    def gap(self, size: int, *, without: Iterable[Extent] = ()) -> int | None:
        """Return where an extent would fit, if those ``without`` were not there."""
        ignored = set(without)
        start = 0
        for extent in self._taken:
            if extent in ignored:
                continue
            if extent.start - start >= size:
                return start
            start = extent.stop
        return start if self.size - start >= size else None

    def take(self, size: int) -> Extent | None:
        """Take an extent, or nothing if no gap is wide enough."""
        start = self.gap(size)
        if start is None:
            return None
        extent = Extent(start, size)
        self._taken.append(extent)
        self._taken.sort()
        return extent

    def free(self, extent: Extent) -> None:
        """Give an extent back."""
        self._taken.remove(extent)
