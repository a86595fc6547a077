"""Which sequence goes first by its class, which may be interrupted, and how long one waits at most.

A class above goes first, which is a lower number, and within a class who came first. If there is no
room, those of classes below are interrupted, and go on later where they were.

Nobody starves. A sequence that has waited for :data:`LATE_AFTER` seconds in all is late, and so is
one that was interrupted :data:`MOST_INTERRUPTIONS` times. One turn in :data:`LATE_EVERY` is of the
late one that has waited for longest, and keeps its place from then on: nobody interrupts it, and it
is computed first. So does one that was interrupted so often when it goes on. They have no more than
one in :data:`LATE_EVERY` of the places, but at least one.

So once it is late, the one that has waited for longest goes after :data:`LATE_EVERY` turns at most
and the end of an answer that runs; if all that may keep their places do, after the end of one of
theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.contract.classes import LATE_AFTER, LATE_EVERY

MOST_INTERRUPTIONS = 4


@dataclass(eq=False)
class PlaceInLine:
    """The place of a sequence among all others."""

    number: int
    """Its class."""
    arrival: int = 0
    since: float | None = None
    """Since when it waits, None while it does not."""
    waited: float = 0.0
    """The seconds for which it has waited before."""
    interruptions: int = 0
    is_kept: bool = False
    """Whether it has waited too long, and now keeps its place."""

    @property
    def rank(self) -> tuple[bool, int, int]:
        """What sequences are sorted by: the first goes first, the last makes room."""
        return not self.is_kept, 0 if self.is_kept else self.number, self.arrival

    def wait(self, now: float) -> None:
        if self.since is None:
            self.since = now

    def go_on(self, now: float) -> None:
        if self.since is not None:
            self.waited += now - self.since
            self.since = None

    def total(self, now: float) -> float:
        """Return for how many seconds it has waited in all."""
        return self.waited + (0.0 if self.since is None else now - self.since)

    def is_late(self, now: float) -> bool:
        return self.total(now) >= LATE_AFTER or self.interruptions >= MOST_INTERRUPTIONS


class TurnCount:
    """Counts turns, so that one in :data:`LATE_EVERY` is of those that have waited too long."""

    def __init__(self, places: int) -> None:
        self._most = max(1, places // LATE_EVERY)
        self._passed = LATE_EVERY - 1

    def has_room(self, kept: int) -> bool:
        """Return whether one more may keep its place."""
        return kept < self._most

    @property
    def is_of_late(self) -> bool:
        """Whether the next turn is of those that have waited too long, if there are any."""
        return self._passed >= LATE_EVERY - 1

    def begin(self, *, is_late: bool) -> None:
        """Note a turn."""
        self._passed = 0 if is_late else min(self._passed + 1, LATE_EVERY - 1)
