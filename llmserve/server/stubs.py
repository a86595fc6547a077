"""The processes that run a server's Python models, and the detection of their deaths.

Triton reaps processes that it has ended itself. One that crashes stays a zombie: Triton never
checks for it, and reports its model as ready as long as Triton runs.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from llmserve.server.guard import members, state_of

_PROGRAM = "triton_python_backend_stub"
_INSTANCE = re.compile(r"(?P<model>.+)_\d+_\d+$")
_ZOMBIE = "Z"
_CONFIRMATIONS = 2
"""A process that has just ended in order is also a zombie for a moment."""
_WAIT4 = ("61", "260")
"""The system call that waits for a process to end, on x86-64 and on ARM."""
_CHECK_INTERVAL = 5.0
"""Seconds between checks for the processes that Triton waits for."""


class Stubs:
    """The processes of one server's Python models; ``group`` is the server's process group."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._models: dict[int, str] = {}
        self._zombie_counts: Counter[int] = Counter()
        self._waited_for: set[int] = set()
        self._checked_at = 0.0

    def poll(self) -> set[str]:
        """Return the models of which a process has died since the last call."""
        died = set()
        alive = members(self._group)
        for process in alive - self._models.keys():
            if model := _model_of(process):
                self._models[process] = model
        for process, model in list(self._models.items()):
            if process not in alive:
                del self._models[process]
                del self._zombie_counts[process]
            elif state_of(process)[:1] == [_ZOMBIE]:
                self._zombie_counts[process] += 1
                if self._zombie_counts[process] == _CONFIRMATIONS:
                    died.add(model)
        return died

    def kill_given_up(self, loading: Collection[str], now: float) -> bool:
        """Kill loading processes that Triton gave up on but waits for; return whether any were.

        If a process hangs for a second while it loads, for example with the whole machine, Triton
        (2.51) considers it unhealthy. Before reporting that, Triton waits for the process to end,
        which never happens, and loads nothing else meanwhile.
        """
        if now - self._checked_at < _CHECK_INTERVAL:
            return False
        self._checked_at, previous = now, self._waited_for
        waited_for = _waited_for(self._group) if loading else set()
        self._waited_for = {pid for pid in waited_for if self._models.get(pid) in loading}
        given_up = previous & self._waited_for
        for process in given_up:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return bool(given_up)

    def of(self, model: str) -> list[int]:
        return [
            process
            for process, owner in self._models.items()
            if owner == model and not self._zombie_counts[process]
        ]

    def seconds(self, model: str) -> float:
        """Return the processor time that a model's processes have used."""
        fields = [state_of(process) for process in self.of(model)]
        ticks = sum(int(stat[11]) + int(stat[12]) for stat in fields if stat)
        return ticks / os.sysconf("SC_CLK_TCK")


def _waited_for(waiting: int) -> set[int]:
    """Return the processes whose end a thread of the process ``waiting`` waits for."""
    processes = set()
    for thread in Path(f"/proc/{waiting}/task").glob("*/syscall"):
        # Errors: the thread has ended, or is in no system call, which is reported as a single word.
        with suppress(OSError, ValueError):
            call, first, *_ = thread.read_text(encoding="ascii").split()
            if call in _WAIT4:
                processes.add(int(first, 16))
    return processes


def _model_of(process: int) -> str | None:
    """Read a model's name from the instance name at the end of its process's command line."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    if not words[0].endswith(_PROGRAM):
        return None
    names = (match["model"] for word in words[2:] if (match := _INSTANCE.match(word)))
    return next(names, None)
