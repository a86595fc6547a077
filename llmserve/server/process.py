"""The server's process, as seen from the one that started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from llmserve.server.launch import Launch, Own

GRACE = 30.0
"""Seconds that a server has for the requests in flight; Triton's own default."""


class ServerProcess:
    """A server under a guard (:mod:`llmserve.server.guard`) that ends it and cleans up."""

    def __init__(self, launch: Launch, own: Own, log_file: Path) -> None:
        watch = {
            "argv": launch.argv,
            "parent": os.getpid(),
            "scratch": str(own.scratch),
            "shm_prefix": own.name,
            "grace": GRACE,
            "last_resort": launch.last_resort,
        }
        guard = Path(__file__).with_name("guard.py")
        with log_file.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(guard), own.name],
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
        self._send(json.dumps(watch).encode() + b"\n")
        with self._guard.stdout as answer:
            self.pid = int(answer.readline() or 0)

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the server runs."""
        return self._guard.poll()

    def wait(self, timeout: float | None) -> int | None:
        """Wait for the server to end by itself; return None where it did not in time."""
        try:
            return self._guard.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace: float) -> None:
        """End the server and wait until it and all that belongs to it is gone."""
        try:
            self._order(grace)
            # The guard kills after ``grace``, so this only ends late where the guard hangs.
            if self.wait(grace + 40.0) is None:
                self._kill()
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
