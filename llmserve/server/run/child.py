"""A program that runs beside a command, and ends with it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence

from llmserve.server.run.guard import PR_SET_PDEATHSIG, name_of_signal


class ChildProcess(subprocess.Popen[str]):
    """A program whose standard error is read, and which gets SIGTERM when this process ends."""

    def __init__(self, command: Sequence[str]) -> None:
        # Not between fork and exec, where another thread's lock would be held for ever.
        parent, libc = os.getpid(), ctypes.CDLL(None)

        def end_with_parent() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        super().__init__(
            command,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            # In a session of its own: Ctrl-C in the terminal is for the command.
            encoding="utf-8", errors="replace", start_new_session=True, preexec_fn=end_with_parent,
        )  # fmt: skip

    @property
    def killed_by(self) -> str:
        """The name of the signal that ended it; "" if none did."""
        code = self.poll()
        return name_of_signal(-code) if code is not None and code < 0 else ""
