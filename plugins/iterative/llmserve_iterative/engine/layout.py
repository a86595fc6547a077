"""Where in a piece of memory things lie that are not all needed at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ALIGNMENT = 64


@dataclass(frozen=True)
class Life:
    """So many bytes, from the step that makes them to the last one that needs them."""

    size: int
    first: int
    last: int


def lay_out(lives: Sequence[Life]) -> tuple[list[int], int]:
    """Return where each begins, and how many bytes that takes.

    Each has the lowest place where it fits among those that live at the same time.

    >>> lay_out([Life(64, 0, 1), Life(64, 1, 2), Life(64, 2, 3)])
    ([0, 64, 0], 128)
    """
    offsets = [0] * len(lives)
    placed: list[int] = []
    for index in sorted(range(len(lives)), key=lambda i: lives[i].first):
        life = lives[index]
        # What ends where this one begins is read in the same step, so it is still there.
        placed = [other for other in placed if lives[other].last >= life.first]
        at = 0
        for other in sorted(placed, key=offsets.__getitem__):
            if at + life.size <= offsets[other]:
                break
            at = max(at, _aligned(offsets[other] + lives[other].size))
        offsets[index] = at
        placed.append(index)
    return offsets, max(
        (at + life.size for at, life in zip(offsets, lives, strict=True)), default=0
    )


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
