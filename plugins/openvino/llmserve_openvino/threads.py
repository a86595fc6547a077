"""How many threads compute: fewer while other programs need the cores.

Threads that share a product wait for each other. On a machine that computes something else as well,
one of them often has no core, and the others wait in vain: as many as there are free cores are then
faster. What others use is what all programs do, without what this process does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PERIOD = 5.0
"""Over how many seconds the use of the cores is looked at."""
_BUSY = 0.5
"""In a period that counts, this share of a core was used or waited for here."""
_FEWER, _MORE = 3, 6
"""After how many periods, one after the other, that ask for it, the number changes."""
_STEP = 1.2
"""A change is by at least this factor."""
_MOST_PATIENCE = 64
_SOON = 60
"""Periods within which a change back shows that the one before it was wrong."""
_MARGIN = 0.6
"""A core of which others use up to this share counts as free: the server's own other processes and
its clients take some of one."""


class CoreUse(NamedTuple):
    """What was used until a time, in seconds of processors."""

    at: float
    own: float
    """By this process."""
    waited: float
    """By threads of this process that could have computed, for a core."""
    everyone: float
    """On the cores that this process may use, by all programs that do not stand back for it."""


def core_use(root: Path = Path("/proc")) -> CoreUse | None:
    """Return what has been used until now, where the system tells."""
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        tick = 1 / os.sysconf("SC_CLK_TCK")
        stands_back = os.nice(0) > 0
        everyone = waited = 0.0
        for line in (root / "stat").read_text(encoding="ascii").splitlines():
            name, *fields = line.split()
            if name in cores:
                user, nice, system, _, _, *others = map(int, fields[:8])
                # A program with a lower priority leaves the cores to this one.
                everyone += user + system + sum(others) + nice * stands_back
        for thread in (root / "self/task").iterdir():
            # It may have ended meanwhile.
            with suppress(OSError):
                waited += int((thread / "schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, AttributeError):
        return None
    return CoreUse(time.monotonic(), time.process_time(), waited, everyone * tick)


class ThreadChoice:
    """Chooses a number of threads, up to as many as a model has without other load."""

    def __init__(
        self,
        threads: int,
        cores: int,
        look: Callable[[], CoreUse | None] = core_use,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.threads = self._most = threads
        """How many compute now; who asks says so after a change."""
        self._cores, self._look, self._clock = cores, look, clock
        self._before: CoreUse | None = None
        self._next = clock()
        self._asked: list[int] = []
        """What the last periods asked for, if each asked for a change in the same direction."""
        self._patience = 1
        self._since_more = _SOON

    def wanted(self) -> int:
        """Return how many threads should compute; cheap, so it may be asked before every pass."""
        if (now := self._clock()) < self._next:
            return self.threads
        self._next = now + _PERIOD
        before, self._before = self._before, self._look()
        if before is None or self._before is None or self._before.at - before.at > 2 * _PERIOD:
            return self.threads
        seconds = self._before.at - before.at
        own = self._before.own - before.own
        if own + self._before.waited - before.waited < _BUSY * seconds:
            return self.threads
        self._since_more += 1
        others = max(0.0, (self._before.everyone - before.everyone - own) / seconds)
        free = min(self._most, max(1, int(self._cores - others + _MARGIN)))
        return self._follow(free)

    def _follow(self, free: int) -> int:
        is_fewer = free * _STEP <= self.threads
        if not is_fewer and free < self.threads * _STEP:
            self._asked = []
            return self.threads
        if self._asked and (self._asked[0] < self.threads) != is_fewer:
            self._asked = []
        self._asked.append(free)
        if len(self._asked) < (_FEWER if is_fewer else _MORE * self._patience):
            return self.threads
        # The least change that each of these periods asked for.
        wanted = max(self._asked) if is_fewer else min(self._asked)
        self._asked = []
        if not is_fewer:
            self._since_more = 0
        elif self._since_more < _SOON:
            # More of them were no gain: that is tried less often then.
            self._patience = min(_MOST_PATIENCE, 2 * self._patience)
        else:
            self._patience = 1
        return wanted
