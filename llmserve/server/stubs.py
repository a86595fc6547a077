"""The processes that run a server's Python models, and which of them have died.

Triton collects a process that it has ended itself. One that dies by accident stays as a zombie:
Triton never looks for it, and calls its model ready for as long as it runs.
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
_CONFIRMED = 2
"""A process that has just ended in order is a zombie as well, for a moment."""
_WAIT4 = ("61", "260")
"""The call that waits for a process's end, on x86-64 and on ARM."""
_APART = 5.0
"""Seconds between two looks at what Triton waits for."""


class Stubs:
    """The Python models' processes of one server; ``group`` is the server's process group."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._models: dict[int, str] = {}
        self._zombie: Counter[int] = Counter()
        self._waited_for: set[int] = set()
        self._looked = 0.0

    def look(self) -> set[str]:
        """Return the models of which a process has died since the last look."""
        died = set()
        alive = members(self._group)
        for process in alive - self._models.keys():
            if model := _model_of(process):
                self._models[process] = model
        for process, model in list(self._models.items()):
            if process not in alive:
                del self._models[process]
                del self._zombie[process]
            elif state_of(process)[:1] == [_ZOMBIE]:
                self._zombie[process] += 1
                if self._zombie[process] == _CONFIRMED:
                    died.add(model)
        return died

    def end_given_up(self, loading: Collection[str], now: float) -> bool:
        """End what Triton has given up and yet waits for, of models that load; say if any was.

        A process that stands still for a second while it loads, with its machine say, is not
        healthy to Triton (2.51). It waits for its end before it says so, which never comes, and
        loads nothing else meanwhile.
        """
        if now - self._looked < _APART:
            return False
        self._looked, before = now, self._waited_for
        waited_for = _waited_for(self._group) if loading else set()
        self._waited_for = {one for one in waited_for if self._models.get(one) in loading}
        given_up = before & self._waited_for
        for process in given_up:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return bool(given_up)

    def of(self, model: str) -> list[int]:
        return [
            process
            for process, owner in self._models.items()
            if owner == model and not self._zombie[process]
        ]

    def seconds(self, model: str) -> float:
        """Return the processor time that a model's processes have used."""
        fields = [state_of(process) for process in self.of(model)]
        ticks = sum(int(found[11]) + int(found[12]) for found in fields if found)
        return ticks / os.sysconf("SC_CLK_TCK")


def _waited_for(waiting: int) -> set[int]:
    """Return the processes for whose end a thread of another one waits."""
    found = set()
    for thread in Path(f"/proc/{waiting}/task").glob("*/syscall"):
        # A thread that has ended, or one that makes no call, which is told in one word.
        with suppress(OSError, ValueError):
            call, first, *_ = thread.read_text(encoding="ascii").split()
            if call in _WAIT4:
                found.add(int(first, 16))
    return found


def _model_of(process: int) -> str | None:
    """Read a model's name off its process's command line, which ends with the instance's."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    if not words[0].endswith(_PROGRAM):
        return None
    names = (found["model"] for word in words[2:] if (found := _INSTANCE.match(word)))
    return next(names, None)
