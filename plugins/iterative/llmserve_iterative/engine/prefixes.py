"""Finished sequences whose cache is kept, for prompts that begin as they did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from llmserve_iterative.engine.arena import Extent

WORTHWHILE = 16
"""Fewer tokens than this are computed faster than they are looked after."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """Tokens whose keys and values lie in an extent."""

    ids: tuple[int, ...]
    extent: Extent

    def shared_with(self, ids: Sequence[int]) -> int:
        """Return how many tokens it begins with that the ids begin with too."""
        return shared(self.ids, ids)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(differing[0]) if differing.size else length


class Prefixes:
    """The kept ones, in the order of their last use."""

    def __init__(self) -> None:
        self._kept: list[Prefix] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def extents(self) -> list[Extent]:
        """Where they lie."""
        return [prefix.extent for prefix in self._kept]

    def keep(self, prefix: Prefix) -> list[Extent]:
        """Keep one and return the extents of those that it makes superfluous."""
        covered = [p for p in self._kept if p.shared_with(prefix.ids) == len(p.ids)]
        self._kept = [p for p in self._kept if p not in covered]
        self._kept.append(prefix)
        return [p.extent for p in covered]

    def forget_oldest(self) -> Extent:
        """Drop the one that was not used for longest."""
        return self._kept.pop(0).extent

    def best(self, ids: Sequence[int], others: Iterable[Prefix] = ()) -> tuple[Prefix, int] | None:
        """Return the one that shares the longest beginning with the ids, and its length."""
        found = [(p.shared_with(ids), p) for p in (*others, *self._kept) if p.ids[0] == ids[0]]
        if not found:
            return None
        length, prefix = max(found, key=lambda pair: pair[0])
        if length < WORTHWHILE:
            return None
        if prefix in self._kept:
            self._kept.remove(prefix)
            self._kept.append(prefix)
        return prefix, length
