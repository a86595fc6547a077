"""What is shown in a terminal, and how the terminal is left."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import sys
import termios
from contextlib import closing

import pytest

from llmserve.commands import printable
from llmserve_cli.terminal import typing_kept

JOB = """
import os, signal, sys, termios
from llmserve_cli.terminal import typing_kept

def shows_control():
    return bool(termios.tcgetattr(0)[3] & termios.ECHOCTL)

if not (job := os.fork()):
    # As a shell does, which gives the terminal to a job, and takes it again.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    try:
        with typing_kept():
            print(shows_control(), flush=True)
            if sys.argv[1] == "background":
                os.tcsetpgrp(0, os.getppid())
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        print(shows_control(), flush=True)
        os._exit(0)
_, status = os.waitpid(job, os.WUNTRACED)
if os.WIFSTOPPED(status):
    print("stopped")
    os.kill(job, signal.SIGKILL)
"""


@pytest.mark.parametrize(("where", "after"), [("foreground", "True"), ("background", "False")])
def test_only_a_job_in_the_foreground_changes_the_terminal(where: str, after: str) -> None:
    """The shell has its own modes then, and would stop a job that changes them."""
    controller, terminal = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    with closing(os.fdopen(controller)), closing(os.fdopen(terminal)):
        result = subprocess.run(
            [sys.executable, "-c", JOB, where],
            stdin=terminal, capture_output=True, text=True, timeout=30, check=True,
            start_new_session=True, preexec_fn=take_terminal,
        )  # fmt: skip
    assert result.stdout.split() == ["False", after]


def test_a_terminal_that_is_gone_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise termios.error(5, "Input/output error")

    monkeypatch.setattr(termios, "tcgetattr", lambda _: [0, 0, 0, termios.ECHOCTL])
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
    monkeypatch.setattr(termios, "tcsetattr", gone)
    with pytest.raises(KeyboardInterrupt), typing_kept():
        raise KeyboardInterrupt


def test_half_of_a_character_is_shown_as_its_number() -> None:
    """JSON may have one, and no stream takes it."""
    escaped = printable("\ud83d and \U0001f642")
    assert escaped == "\\ud83d and \U0001f642"
    escaped.encode()
