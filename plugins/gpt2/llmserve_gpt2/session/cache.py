"""How long a sequence's cache is in the generator, and how sequences come to share a batch.

Triton knows nothing of the lengths of states, and its native backends take all rows of a batch
to be as long as the first. So the lengths are made equal here: who has less gets a gap in
front, which the mask hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FIRST = 1
"""What a state begins with: one slot of zeros, for Triton has no state of no length."""


@dataclass
class Lane:
    """A sequence's cache: ``held`` slots, the last ``real`` of which are tokens of its text."""

    held: int = FIRST
    real: int = 0

    def positions(self, new: int) -> npt.NDArray[np.int64]:
        """Return where in the text the new tokens stand."""
        return np.arange(self.real, self.real + new, dtype=np.int64)

    def mask(self, new: int, room: int) -> npt.NDArray[np.int64]:
        """Return what may be looked at, the new tokens included."""
        mask = np.zeros(room, np.int64)
        mask[room - self.real - new :] = 1
        return mask

    def grow(self, new: int, room: int) -> None:
        """Take note of a step that was made."""
        self.held = room
        self.real += new


def rooms(lanes: Sequence[Lane], news: Sequence[int], *, longest: int, gap: int) -> list[int]:
    """Say how long each cache shall be after the next step.

    All become as long as the longest, so that later steps are made in one batch; but nobody
    gets a gap that costs more than a batch of one's own, and nobody is drawn beyond
    ``longest``, or sequences that come and go would draw each other on for ever.

    >>> rooms([Lane(9, 8), Lane(3, 2)], [1, 1], longest=64, gap=64)
    [10, 10]
    """
    needed = [lane.held + new for lane, new in zip(lanes, news, strict=True)]
    chosen = []
    for need in needed:
        others = [room for room in needed if need <= room <= min(longest, need + gap)]
        chosen.append(max(others, default=need))
    return chosen
