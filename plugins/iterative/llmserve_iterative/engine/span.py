"""A stretch of one sequence that a single pass computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from llmserve_iterative.engine.arena import Extent
from llmserve_iterative.engine.sequence import Sequence


@dataclass(frozen=True)
class Span:
    """Tokens ``start`` to ``stop`` of a sequence; everything before them is in the cache."""

    sequence: Sequence
    start: int
    stop: int

    @cached_property
    def ids(self) -> list[int]:
        """The tokens themselves."""
        return self.sequence.tokens(self.start, self.stop)

    @property
    def extent(self) -> Extent:
        """Where in the cache the sequence lies."""
        return self.sequence.extent

    @property
    def complete(self) -> bool:
        """Whether its last token is the sequence's newest, so that a new one can be chosen."""
        return self.stop == self.sequence.length
