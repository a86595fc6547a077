"""How processes end, in words, and whether the next one may fare better."""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmserve.server.run.guard import name_of_signal

_TAKES = 10.0
"""Seconds within which a process that the system kills is gone, with all of its memory."""


@dataclass(frozen=True)
class End:
    """The end of a process: its exit code, or the signal that ended it.

    >>> str(End(code=1))
    'exit code 1'
    """

    code: int = 0
    signal: int = 0
    of_memory: bool = False
    """Whether the system has killed it, or one beside it, since memory ran out."""

    @classmethod
    def of_status(cls, status: int, *, of_memory: bool) -> End:
        """Return the end that a wait status describes."""
        if os.WIFSIGNALED(status):
            return cls(signal=(number := os.WTERMSIG(status)),
                       of_memory=of_memory and number == signal.SIGKILL)  # fmt: skip
        return cls(code=os.WEXITSTATUS(status))

    @property
    def may_be_chance(self) -> bool:
        """Whether it says nothing against the program: on a busy machine, any may end like this."""
        return not self.signal

    def __str__(self) -> str:
        if self.of_memory:
            return "killed by the system, which has too little memory"
        return (
            f"killed by {name_of_signal(self.signal)}" if self.signal else f"exit code {self.code}"
        )


class MemoryKills:
    """Tells whether the system has just killed a process for want of memory.

    It counts such kills; who watches processes has them noted meanwhile.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._noted = self._count()
        self._last = -math.inf

    def note(self) -> None:
        if (count := self._count()) != self._noted:
            self._noted, self._last = count, time.monotonic()

    def happened(self) -> bool:
        self.note()
        return time.monotonic() - self._last < _TAKES

    def _count(self) -> int:
        """Return how often that has happened on this machine, and in this container."""
        count = 0
        for path in ("proc/vmstat", "sys/fs/cgroup/memory.events"):
            with suppress(OSError, ValueError):
                lines = (self._root / path).read_text(encoding="ascii").splitlines()
                count += sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return count
