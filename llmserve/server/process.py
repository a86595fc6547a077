"""What servers and frontends have to themselves: a process under a guard, and a folder."""

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
from llmserve.server import guard
from llmserve.server.guard import LOCK, Watch, remove_leftovers
from llmserve.server.launch import Launch

_LOOK = 0.2
_IDLE = 4.0


def scratch_folder() -> Path:
    """Return where TMPDIR says, unless Triton's shell would trip over it."""
    folder = tempfile.gettempdir()
    return Path(folder if re.fullmatch(r"[\w./+-]+", folder, re.ASCII) else "/tmp")


def make_scratch() -> tuple[str, Path]:
    """Return a name that nothing else has, and a folder that is called after it."""
    name = f"llmserve-{secrets.token_hex(6)}"
    folder = scratch_folder()
    try:
        return name, Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
    except OSError as error:
        raise ServerError(
            f"cannot write to {folder} ({error.strerror})",
            mend="set TMPDIR to a folder whose path is made of ASCII letters and digits",
        ) from None


_LAID_OUT = 60.0
"""Seconds after which a folder has its guard, if it will ever have one."""


def sweep() -> None:
    """Remove what is left of this user's servers that were killed with their guards and all."""
    for folder in scratch_folder().glob("llmserve-*-*"):
        named = re.fullmatch(r"(llmserve-[0-9a-f]{12})-\w+", folder.name)
        with suppress(OSError):
            found = folder.lstat()
            if not named or not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            with (folder / LOCK).open("rb") as file:
                if time.time() - os.fstat(file.fileno()).st_mtime < _LAID_OUT:
                    continue
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_leftovers(named[1], folder)


class GuardedProcess:
    """A process under a guard (:mod:`llmserve.server.guard`) that ends it and cleans up."""

    def __init__(
        self, launch: Launch, name: str, scratch: Path, log_file: Path, *, grace: float
    ) -> None:
        watch = Watch(launch.argv, os.getpid(), str(scratch), name, grace, launch.last_resort)
        with log_file.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(launch.env),
                # So that Ctrl-C in the terminal reaches this process alone.
                start_new_session=True,
            )
        if self._guard.stdout is None or self._guard.stdin is None:
            raise AssertionError("both were asked for as pipes")
        self._orders = self._guard.stdin
        self._send(json.dumps(asdict(watch)).encode() + b"\n")
        with self._guard.stdout as answer:
            self.pid = int(answer.readline() or 0)

    def alive(self) -> bool:
        return self._guard.poll() is None

    def wait(self, timeout: float | None) -> int | None:
        """Wait for the server to end by itself; return None where it did not in time."""
        try:
            return self._guard.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace: float, *, idle: Callable[[], bool] = lambda: False) -> None:
        """End the process and wait until it and all that belongs to it is gone.

        Once it is ``idle`` it has no more than four seconds.
        """
        try:
            self._order(grace)
            # The guard kills after ``grace``, so this only ends late where the guard hangs.
            deadline, hurried = time.monotonic() + grace + 40.0, False
            while self.wait(_LOOK) is None:
                if time.monotonic() > deadline:
                    self._kill()
                elif not hurried and idle():
                    hurried = True
                    self._order(_IDLE)
        except BaseException:
            # Interrupted while waiting, as by a second Ctrl-C: no more patience.
            self._order(0.0)
            if self.wait(5.0) is None:
                self._kill()
            raise
        finally:
            with suppress(OSError):
                self._orders.close()

    def _order(self, grace: float) -> None:
        self._send(b"%f\n" % grace)

    def _send(self, line: bytes) -> None:
        # A guard that has ended reads nothing, and needs no order any more.
        with suppress(OSError, ValueError):
            self._orders.write(line)
            self._orders.flush()

    def _kill(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._guard.kill()
        self._guard.wait()
