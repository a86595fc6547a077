"""The cache as the engine sees it: room for live sequences, and prefixes worth keeping."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several

from llmserve.runtime.generation import Generation
from llmserve_iterative.engine.arena import Arena, Extent, rounded
from llmserve_iterative.engine.prefixes import WORTHWHILE, Prefix, Prefixes
from llmserve_iterative.engine.sequence import Sequence, room

Copy = Callable[[Extent, Extent, int], None]
"""Copies the keys and values of so many tokens from one extent to another."""


class Room:
    """A sequence gets all the room it may need when it starts, so it never has to stop midway.

    What finished sequences computed stays until the room is needed.
    """

    def __init__(self, size: int, copy: Copy) -> None:
        self._arena = Arena(size)
        self._prefixes = Prefixes()
        self._copy = copy

    @property
    def size(self) -> int:
        """How many tokens fit."""
        return self._arena.size

    @property
    def kept(self) -> int:
        """How much finished sequences hold."""
        return sum(extent.size for extent in self._prefixes.extents)

    @property
    def used(self) -> int:
        """How much live sequences hold."""
        return self._arena.used - self.kept

    def could_hold(self, tokens: int) -> bool:
        """Whether a sequence of that many tokens fits into the empty cache."""
        return rounded(tokens) <= self._arena.size

    def take(self, generation: Generation) -> Extent | None:
        """Take room for a generation; kept prefixes give way, the longest unused one first."""
        size = rounded(room(generation))
        if self._arena.gap(size, without=self._prefixes.extents) is None:
            return None
        # Looking for it makes the best prefix the last to give way.
        self._prefixes.best(generation.prompt_ids)
        while (extent := self._arena.take(size)) is None:
            self._arena.free(self._prefixes.forget_oldest())
        return extent

    def furnish(self, sequence: Sequence, live: Several[Sequence]) -> None:
        """Copy what is already computed of a new sequence's prompt, except its last token."""
        prompt = sequence.generation.prompt_ids[:-1]
        if len(prompt) < WORTHWHILE:
            return
        running = [Prefix(tuple(s.tokens(0, s.computed)), s.extent) for s in live if s.computed]
        if found := self._prefixes.best(prompt, running):
            prefix, length = found
            self._copy(prefix.extent, sequence.extent, length)
            sequence.computed = length

    def retire(self, sequence: Sequence) -> None:
        """Keep what a finished sequence computed, until the room is needed."""
        if sequence.computed < WORTHWHILE:
            self.free(sequence)
            return
        ids = tuple(sequence.tokens(0, sequence.computed))
        for superfluous in self._prefixes.keep(Prefix(ids, sequence.extent)):
            self._arena.free(superfluous)

    def free(self, sequence: Sequence) -> None:
        """Give back all the room of a sequence."""
        self.give_back(sequence.extent)

    def give_back(self, extent: Extent) -> None:
        """Give back room that nobody lives in."""
        self._arena.free(extent)
