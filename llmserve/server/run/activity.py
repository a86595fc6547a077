"""What a process that does not answer does meanwhile: it works, waits, or is stopped.

One that waits for a processor, or for its memory to be read from a disk, works: the machine has too
much to do, and a restart would give it more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmserve.server.run.guard import state_of

BUSY = 0.05
"""What uses this share of the time is working, even if it answers nothing yet."""
_STOPPED = "T"
_STOPPED_FOR = 2.0
"""Seconds after which a process that a signal has stopped is not about to be continued."""
_FAULTS, _USER, _SYSTEM = 9, 11, 12
"""Where :func:`state_of` has the pages read from a disk, and the time of processors in ticks."""


@dataclass(frozen=True)
class Activity:
    """What processes have had of the machine so far, all threads together."""

    at: float
    seconds: float
    """On a processor."""
    faults: int
    """Pages that were read from a disk."""
    waited: Mapping[str, float]
    """For how many seconds each thread has waited for a processor, if the kernel counts that."""

    @classmethod
    def of(cls, processes: Iterable[int]) -> Activity:
        seconds, faults = 0.0, 0
        waited: dict[str, float] = {}
        for process in processes:
            if fields := state_of(process):
                seconds += processor_time(fields)
                faults += int(fields[_FAULTS])
                waited |= _waited(process)
        return cls(time.monotonic(), seconds, faults, waited)

    def is_work_since(self, before: Activity) -> bool:
        # Threads end, and what they have waited for goes with them.
        used = (
            self.seconds
            - before.seconds
            + sum(
                seconds - before.waited.get(thread, 0.0) for thread, seconds in self.waited.items()
            )
        )
        return self.faults > before.faults or used > BUSY * (self.at - before.at)


def processor_time(fields: list[str]) -> float:
    """Return the seconds of processors that a process has used, from its ``stat`` line."""
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")


def _waited(process: int) -> dict[str, float]:
    waited = {}
    # It may end meanwhile, as a whole or some of its threads.
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with suppress(OSError, ValueError, IndexError):
                counted = (thread / "schedstat").read_text(encoding="ascii").split()
                waited[thread.name] = int(counted[1]) / 1e9
    return waited


class Stops:
    """Notices processes that stay stopped, as by SIGSTOP, and hang until they are continued."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def check(self, processes: Iterable[int], now: float) -> set[int]:
        """Return those of the processes that have been stopped for a while."""
        stopped = [process for process in processes if state_of(process)[:1] == [_STOPPED]]
        self._since = {process: self._since.get(process, now) for process in stopped}
        return {each for each, since in self._since.items() if now - since >= _STOPPED_FOR}
