"""Does work on what users send in a process of its own, where it can take only so much.

A few bytes can keep a library busy for minutes, take all memory, or end the process. So such work
is done in a child process with limits.

The module is also the script of the process that starts these children. It has no packages but
those that its work needs: it reads its setup and then questions, and answers each. It forks for
every question, since only a new process has its own limits, and no thread but one. A message is a
line of JSON, with a number of bytes that follow it.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_START_SECONDS = 60.0

Message = tuple[Mapping[str, Any], bytes]
Work = Callable[[Any, bytes], Message]
"""Answers a question, in a process that has the limits."""


@dataclass(frozen=True)
class Limits:
    """What one question may take."""

    cpu_seconds: float
    wall_seconds: float
    """Ends a child that hardly gets any processor time."""
    memory: int
    """In bytes, beside what the process had before."""
    stack: int


class SetupError(Exception):
    """The work cannot be done with this setup, however often the process is started."""


class TooSlowError(Exception):
    """A question took more time than it may."""


class TooLargeError(Exception):
    """A question took more memory than it may, or ended its process."""


class LimitedProcess:
    """The process that does one kind of work. It ends with the process that started it.

    ``work`` is a script whose ``prepare(setup)`` returns the :data:`Work`; ``library`` is the
    folder of the packages that it imports.
    """

    def __init__(
        self, work: str, library: Path, limits: Limits, setup: Mapping[str, Any] | None = None
    ) -> None:
        # The interpreter in Triton's stub may not know its own path.
        command = [sys.executable or "python3", "-I", "-S", __file__]
        near, far = socket.socketpair()
        with far:
            self._process = subprocess.Popen(command, stdin=far.fileno(), stdout=far.fileno())
        self._stream = near.makefile("rwb")
        self._socket = near
        self._seconds = 2 * limits.wall_seconds
        about = {"work": work, "library": str(library), "limits": asdict(limits)}
        try:
            answer, _ = self._asked({**about, "setup": setup or {}}, b"", _START_SECONDS)
            if "error" in answer:
                raise SetupError(answer["error"])
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: Any, content: bytes = b"") -> Message:
        """Return the answer to a question.

        Raise :class:`TooSlowError` or :class:`TooLargeError` if it exceeds the limits, and
        :class:`OSError` if the process has ended.
        """
        answer, more = self._asked(question, content, self._seconds)
        if ended := answer.get("ended"):
            raise TooSlowError if ended == "slow" else TooLargeError
        return answer, more

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()
        with suppress(OSError):
            self._stream.close()

    def _asked(self, question: Any, content: bytes, seconds: float) -> Message:
        self._socket.settimeout(seconds)
        _write(self._stream, question, content)
        message = _read(self._stream)
        if message is None:
            raise OSError("the process that does this has ended")
        return message


def main() -> None:
    """Answer questions until the process that asks them has ended."""
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    about = _read(questions)
    if about is None:
        return
    setup = about[0]
    # Ctrl-C reaches all processes of a terminal; the model's process decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.append(setup["library"])
    try:
        # It is run as a script, which is in no package.
        work = runpy.run_path(setup["work"])["prepare"](setup["setup"])
    except (MemoryError, OSError):
        # There may be enough for it next time.
        raise
    except BaseException as error:  # a panic is no Exception
        _write(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    _write(answers, {})
    while (message := _read(questions)) is not None:
        answers.write(_answered(work, setup["limits"], *message))
        answers.flush()


def _write(stream: Any, value: Any, content: bytes = b"") -> None:
    stream.write(_message(value, content))
    stream.flush()


def _message(value: Any, content: bytes) -> bytes:
    return json.dumps([value, len(content)]).encode() + b"\n" + content


def _read(stream: Any) -> Message | None:
    """Return the next message, None if there is no whole one."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    value, size = json.loads(line)
    content = stream.read(size) if size else b""
    return (value, content) if len(content) == size else None


def _answered(work: Work, limits: Mapping[str, Any], question: Any, content: bytes) -> bytes:
    """Answer in a child process; return what it says, or why it ended."""
    far_end, near_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(far_end)
        _answer(work, limits, question, content, near_end)
    os.close(near_end)
    said = _read_all(far_end, time.monotonic() + limits["wall_seconds"])
    os.close(far_end)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if said.endswith(_END):
        return said[: -len(_END)]
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    slow = ended_by in (signal.SIGPROF, signal.SIGKILL)
    return _message({"ended": "slow" if slow else "large"}, b"")


# What a child has said is whole if it ends with this.
_END = b"\n.\n"


def _read_all(pipe: int, deadline: float) -> bytes:
    """Read until the child ends; nothing if that takes too long."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return b""
        part = os.read(pipe, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _answer(work: Work, limits: Mapping[str, Any], question: Any, content: bytes, out: int) -> None:
    """Answer within the limits; end the process."""
    try:
        with Path(os.devnull).open("wb") as nowhere:
            # Libraries print what they panic about.
            os.dup2(nowhere.fileno(), 2)
        memory, stack = _memory() + limits["memory"], limits["stack"]
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # SIGPROF ends the process unless it is handled.
        signal.setitimer(signal.ITIMER_PROF, limits["cpu_seconds"])
        answer, more = work(question, content)
        with open(out, "wb") as pipe:
            pipe.write(_message(answer, more))
            pipe.write(_END)
    finally:
        os._exit(0)


def _memory() -> int:
    """Return how many bytes this process has been given."""
    pages = Path("/proc/self/statm").read_bytes().split()
    return int(pages[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
