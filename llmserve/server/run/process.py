"""Guarded processes and scratch folders, used by servers and frontends."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from llmserve.errors import ServerError
from llmserve.hardware import MemoryKills
from llmserve.server.find.launch import Launch
from llmserve.server.run import guard
from llmserve.server.run.ends import End
from llmserve.server.run.guard import (
    LOCK,
    ZOMBIE,
    Guarded,
    clean_up,
    name_of_signal,
    remove_leftovers,
    state_of,
)
from llmserve.server.run.private import check_temporary, open_log

_POLL = 0.2
_IDLE_GRACE = 4.0
SIGNALLED = 128
"""A guard's exit code is this and the number of the signal, if one ended the process."""
_ORPHANS_GRACE = 10.0
"""Seconds for killed processes to be gone, whatever the machine does meanwhile."""


def scratch_folder() -> Path:
    """Return the folder of TMPDIR, unless its path does not suit (workarounds.UNQUOTED)."""
    folder = tempfile.gettempdir()
    return Path(folder if re.fullmatch(r"[\w./+-]+", folder, re.ASCII) else "/tmp")


def make_scratch() -> tuple[str, Path]:
    """Return a unique name, and a new folder named after it."""
    name = f"llmserve-{secrets.token_hex(6)}"
    folder = scratch_folder()
    try:
        check_temporary(folder)
        return name, Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
    except OSError as error:
        raise ServerError(
            f"cannot write to {folder} ({error.strerror})",
            hint="set TMPDIR to a folder whose path has only ASCII letters and digits",
        ) from None


_SETUP_TIME = 60.0
"""Seconds after which a folder has its guard, if it will ever have one."""


def sweep() -> None:
    """Remove the leftovers of this user's servers that were killed together with their guards."""
    for folder in scratch_folder().glob("llmserve-*-*"):
        match = re.fullmatch(r"(llmserve-[0-9a-f]{12})-\w+", folder.name)
        with suppress(OSError):
            status = folder.lstat()
            if not match or not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            with (folder / LOCK).open("rb") as file:
                if time.time() - os.fstat(file.fileno()).st_mtime < _SETUP_TIME:
                    continue
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_leftovers(match[1], folder)


class GuardedProcess:
    """A process with a guard (:mod:`llmserve.server.run.guard`) that ends it and cleans up."""

    def __init__(
        self, launch: Launch, name: str, scratch: Path, log_file: Path, *, grace: float
    ) -> None:
        self._watch = Guarded(
            launch.argv, os.getpid(), str(scratch), name, grace, launch.last_resort
        )
        self._memory_kills = MemoryKills()
        with open_log(log_file) as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(launch.env),
                # So that Ctrl-C in the terminal reaches only this process.
                start_new_session=True,
            )
        if self._guard.stdout is None or self._guard.stdin is None:
            raise AssertionError("both are pipes")
        self._orders = self._guard.stdin
        self._send(json.dumps(asdict(self._watch)).encode() + b"\n")
        with self._guard.stdout as stdout:
            self.pid = int(stdout.readline() or 0)

    def alive(self) -> bool:
        return self._guard.poll() is None

    def wait(self, timeout: float | None) -> int | None:
        """Wait for the server to end on its own; return None on timeout."""
        try:
            return self._guard.wait(timeout)
        except subprocess.TimeoutExpired:
            self._memory_kills.note()
            if state_of(self.pid)[:1] == [ZOMBIE]:
                self._wake_guard()
            return None

    def why_it_ended(self) -> str:
        """Return its exit code, or the signal that ended it or its guard; "" if it still runs."""
        code = self._guard.poll()
        if code is None:
            return ""
        if code < 0:
            return f"its guard was killed by {name_of_signal(-code)}"
        if code > SIGNALLED:
            number = code - SIGNALLED
            of_memory = number == signal.SIGKILL and self._memory_kills.happened()
            return str(End(signal=number, of_memory=of_memory))
        return str(End(code))

    def stop(self, grace: float, *, idle: Callable[[], bool] = lambda: False) -> None:
        """End the process and wait until it and all its child processes and files are gone.

        Once ``idle`` returns True, it has at most four more seconds.
        """
        self._wake_guard()
        try:
            self._order(grace)
            # The guard kills after ``grace``, so the deadline is reached only if the guard hangs.
            deadline, hurried = time.monotonic() + grace + 40.0, False
            while self.wait(_POLL) is None:
                if time.monotonic() > deadline:
                    self._kill()
                elif not hurried and idle():
                    hurried = True
                    self._order(_IDLE_GRACE)
        except BaseException:
            # Interrupted while waiting, for example by a second Ctrl-C: end it at once.
            self._order(0.0)
            if self.wait(5.0) is None:
                self._kill()
            raise
        finally:
            with suppress(OSError):
                self._orders.close()
            self._end_orphans()

    def _wake_guard(self) -> None:
        """Continue a guard that someone has stopped; otherwise, this changes nothing."""
        self._guard.send_signal(signal.SIGCONT)

    def _end_orphans(self) -> None:
        """End what has outlived a guard that was killed, and clean up in its place."""
        with suppress(OSError), Path(self._watch.scratch, LOCK).open("rb") as lock:
            deadline = time.monotonic() + _ORPHANS_GRACE
            while not _acquired(lock.fileno()) and time.monotonic() < deadline:
                # While one of them holds the lock, no other group has this number.
                if self.pid:
                    with suppress(ProcessLookupError):
                        os.killpg(self.pid, signal.SIGKILL)
                time.sleep(_POLL / 4)
            clean_up(self._watch)

    def _order(self, grace: float) -> None:
        self._send(b"%f\n" % grace)

    def _send(self, line: bytes) -> None:
        # A guard that has ended reads nothing and needs no orders.
        with suppress(OSError, ValueError):
            self._orders.write(line)
            self._orders.flush()

    def _kill(self) -> None:
        self._guard.kill()
        self._guard.wait()


def _acquired(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
