"""A command in a terminal of its own, as a user sits in front of it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

from llmserve.testing.command import LLMSERVE

_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[>=])|\x08")
_WAITS = re.compile(r"\x1b\[\?2004h(\x1b\[\?1l)?\x1b\[\?25l")
"""Asks the terminal to mark what is pasted and begins to draw: a message can be typed."""
ENTER, CTRL_C, CTRL_D, CTRL_J, UP = "\r", "\x03", "\x04", "\n", "\x1b[A"


def pasted(text: str) -> str:
    """Return what a terminal sends for a text that is pasted."""
    return f"\x1b[200~{text}\x1b[201~"


class Terminal:
    """Runs `llmserve`, and has all that it has shown so far, without escape sequences."""

    def __init__(
        self, *words: str, env: Mapping[str, str] | None = None, columns: int = 80
    ) -> None:
        self._controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        # What is typed here is kept nowhere, unless a test names a place.
        history = {} if "XDG_STATE_HOME" in (env or {}) else {"LLMSERVE_HISTORY": ""}
        surroundings = {
            **os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **history, **(env or {})
        }  # fmt: skip

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [*LLMSERVE, *words],
            stdin=terminal, stdout=terminal, stderr=terminal, env=surroundings,
            start_new_session=True, preexec_fn=take_terminal,
        )  # fmt: skip
        os.close(terminal)
        self._raw = ""
        self._seen = self._prompts = 0
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.process.kill()
        self.process.wait()
        os.close(self._controller)

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self._raw).replace("\r", "")

    @property
    def shows_control(self) -> bool:
        """Whether it shows a typed Ctrl-C as ^C."""
        return bool(termios.tcgetattr(self._controller)[3] & termios.ECHOCTL)

    def type(self, *keys: str) -> None:
        os.write(self._controller, "".join(keys).encode())

    def wait_for(self, pattern: str, timeout: float = 60.0) -> str:
        """Wait until it shows something new that matches, and return all up to there."""
        deadline = time.monotonic() + timeout
        while True:
            is_last = not self._reading.is_alive()
            if match := re.compile(pattern).search(self.text, self._seen):
                break
            self._is_not_over(is_last, deadline)
            time.sleep(0.02)
        start, self._seen = self._seen, match.end()
        return self.text[start : match.end()]

    def say(self, text: str, *keys: str) -> None:
        """Type a message when it waits for one."""
        deadline = time.monotonic() + 60
        while len(_WAITS.findall(self._raw)) == self._prompts:
            self._is_not_over(not self._reading.is_alive(), deadline)
            time.sleep(0.02)
        self._prompts += 1
        self.type(text, *(keys or (ENTER,)))

    def ends(self, code: int = 0) -> None:
        assert self.process.wait(60) == code, self.text

    def _is_not_over(self, is_last: bool, deadline: float) -> None:
        assert not is_last, self.text
        assert time.monotonic() < deadline, self.text

    def _read(self) -> None:
        with suppress(OSError):
            while data := os.read(self._controller, 65536):
                self._raw += data.decode(errors="replace")
