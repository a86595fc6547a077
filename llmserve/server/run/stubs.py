"""The processes that run a server's Python models, and the detection of their deaths.

Triton reaps processes that it has ended itself, and no other (workarounds.CRASHED).
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from llmserve.hardware import MemoryKills
from llmserve.server.run.activity import Stops, processor_time
from llmserve.server.run.ends import End
from llmserve.server.run.guard import ZOMBIE, members, state_of
from llmserve.server.workarounds import waited_for

_PROGRAM = "triton_python_backend_stub"
_INSTANCE = re.compile(r"(?P<model>.+)_\d+_\d+$")
_EXIT_CODE = 49
"""The index of the wait status in the fields that :func:`state_of` returns."""
CONFIRMATIONS = 2
"""A process that has just ended in order is also a zombie for a moment."""
_CHECK_INTERVAL = 5.0
"""Seconds between checks for the processes that Triton waits for."""


class Stubs:
    """The processes of one server's Python models; ``group`` is the server's process group.

    ``root`` is the system's root folder.
    """

    def __init__(self, group: int, root: Path = Path("/")) -> None:
        self._group = group
        self._models: dict[int, str] = {}
        self._zombie_counts: Counter[int] = Counter()
        self._waited_for: set[int] = set()
        self._checked_at = 0.0
        self._members: set[int] = set()
        self._parents: dict[int, int] = {}
        """Of each member, if that was asked for since the last poll."""
        self._stops = Stops()
        self._memory_kills = MemoryKills(root)

    def poll(self, loading: Collection[str] = ()) -> dict[str, End]:
        """Return the models of which a process has died since the last call, and what ended it.

        A process that was never seen alive is one of the models that are ``loading``.
        """
        died: dict[str, End] = {}
        alive = self._members = members(self._group)
        self._parents.clear()
        for process in alive - self._models.keys():
            if (model := _model_of(process)) is not None:
                self._models[process] = model
        for process, model in list(self._models.items()):
            if process not in alive:
                del self._models[process]
                del self._zombie_counts[process]
                continue
            fields = state_of(process)
            if fields[:1] == [ZOMBIE]:
                self._zombie_counts[process] += 1
                if self._zombie_counts[process] == CONFIRMATIONS:
                    unknown = [name for name in loading if not self.of(name)]
                    status, of_memory = int(fields[_EXIT_CODE]), self._memory_kills.happened()
                    end = End.of_status(status, of_memory=of_memory)
                    died |= dict.fromkeys([model] if model else unknown, end)
        self._memory_kills.note()
        return died

    def kill_given_up(self, loading: Collection[str], now: float) -> set[str]:
        """Kill loading processes that Triton gave up on but waits for; return their models."""
        given_up = self.given_up(loading, now)
        for process in given_up:
            _kill(process)
        return set(given_up.values())

    def given_up(self, loading: Collection[str], now: float) -> dict[int, str]:
        """Return loading processes that Triton gave up on but waits for, and their models.

        See workarounds.GIVEN_UP.
        """
        if now - self._checked_at < _CHECK_INTERVAL:
            return {}
        self._checked_at, previous = now, self._waited_for
        processes = waited_for(self._group) if loading else set()
        self._waited_for = {pid for pid in processes if self._models.get(pid) in loading}
        return {process: self._models[process] for process in previous & self._waited_for}

    def kill(
        self, model: str, processes: Collection[int] | None = None, *, is_death: bool = False
    ) -> None:
        """Kill the processes of a model, or only these.

        With ``is_death``, :meth:`poll` reports that.
        """
        for process in self.of(model) if processes is None else processes:
            if not is_death:
                self._zombie_counts[process] = CONFIRMATIONS
            _kill(process)

    def of(self, model: str) -> list[int]:
        return [
            process
            for process, owner in self._models.items()
            if owner == model and not self._zombie_counts[process]
        ]

    def memory(self, model: str) -> tuple[int, int]:
        """Return the bytes that a model's processes have, and the most that they ever had.

        Those are resident ones, so that what processes share is counted for each.
        """
        processes = {*self.of(model)}
        self._parents = self._parents or {each: _parent(each) for each in self._members}
        parents = self._parents
        found = [process for process in parents if _descends(process, processes, parents)]
        sizes = [_resident(process) for process in found]
        return sum(now for now, _ in sizes), sum(most for _, most in sizes)

    def seconds(self, model: str) -> float:
        """Return the processor time that a model's processes have used."""
        fields = [state_of(process) for process in self.of(model)]
        return sum(processor_time(stat) for stat in fields if stat)

    def stopped(self, now: float) -> set[str]:
        """Return the models of which a process stays stopped."""
        processes = [each for each in self._models if not self._zombie_counts[each]]
        return {self._models[process] for process in self._stops.check(processes, now)}


def _parent(process: int) -> int:
    return int((state_of(process)[1:2] or ["0"])[0])


def _descends(process: int, ancestors: Collection[int], parents: Mapping[int, int]) -> bool:
    while process not in ancestors:
        if (process := parents.get(process, 0)) == 0:
            return False
    return True


def _resident(process: int) -> tuple[int, int]:
    """Return the resident bytes of a process, and the most that it ever had."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0, 0
    fields = dict(line.partition(":")[::2] for line in status.splitlines())
    now, most = (int((fields.get(key) or "0").split()[0]) << 10 for key in ("VmRSS", "VmHWM"))
    return now, most


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _model_of(process: int) -> str | None:
    """Return the model that a process runs; "" if that is unknown, None if it runs none.

    It is in the path of the model's file, ``.../NAME/VERSION/model.py``, or for the file of a
    backend in the name of the instance, at the end of the command line.
    """
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
        program = Path(f"/proc/{process}/comm").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    if not words[0]:
        # A zombie has no command line any more, and only the first 15 characters of its name.
        return "" if program.strip() == _PROGRAM[:15] else None
    if not words[0].endswith(_PROGRAM):
        return None
    path = Path(words[1])
    if path.parent.name.isdecimal():
        return path.parent.parent.name
    names = (match["model"] for word in words[2:] if (match := _INSTANCE.match(word)))
    return next(names, None)
