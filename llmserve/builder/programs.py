"""Runs a part of a build as a program of its own, whose memory is freed when it ends.

What such a program tells the build, it tells with the functions at the end.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmserve.builder.progress import PartDone
from llmserve.errors import OutputError, ShortageError
from llmserve.hardware import MemoryKills, addresses, memory, share_cores
from llmserve.texts import in_gb

PROGRAM_DONE = "llmserve-done "
"""Before the share that is done, in a line of its own on the standard output of such a program."""


NOT_WRITTEN = 74
"""The exit status of such a program if it has converted a model, and cannot write it."""
NO_MEMORY = 71
"""The exit status if the system gives it no more memory, as with a limit."""
_FULL = 1 << 20
"""The bytes below which a disk is full: the last of it is too little for what was written."""


@dataclass(frozen=True)
class Ended:
    """How a program has ended: its exit code, below 0 for a signal, and its last words."""

    code: int
    words: str = ""

    @property
    def reason(self) -> str:
        if self.words and self.code > 0:
            return self.words
        if self.code < 0:
            return f"it was ended by {signal.Signals(-self.code).name}"
        return self.words or f"exit status {self.code}"


def run_program(
    arguments: Sequence[str],
    *,
    words: str,
    report: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a program and report the share that it says is done; ``words`` say what it does.

    Raises :class:`ShortageError` if the system has killed it for want of memory.
    """
    kills, before = MemoryKills(), memory().free
    env = {**os.environ, **(environment or {})}
    share_cores(env)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            arguments,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=env,
            encoding="utf-8",
            errors="replace",
        )
        report(PartDone(words, 0))
        with process:
            try:
                for line in process.stdout or ():
                    if line.startswith(PROGRAM_DONE):
                        report(PartDone(words, float(line[len(PROGRAM_DONE) :])))
            except BaseException:
                # Nobody waits for it any more.
                process.kill()
                raise
        errors.seek(0)
        lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
    if process.returncode == -signal.SIGKILL and kills.happened():
        raise ShortageError(
            f"{words} was killed by the system, which has too little memory: "
            f"{in_gb(before)} were free when it began",
            hint="end other programs, use a larger machine, or see what --fit chooses",
        )
    last = lines[-1] if lines else ""
    if process.returncode and addresses() != float("inf"):
        last += f" (ulimit -v allows it {in_gb(addresses())})"
    return Ended(process.returncode, last)


def refuse_shortage(ended: Ended, folder: Path, words: str) -> None:
    """Raise what a program has ended for if it had too little memory, or space in a folder.

    ``words`` say what it did.
    """
    if ended.code == NOT_WRITTEN:
        raise _not_written(ended, folder)
    if ended.code == NO_MEMORY:
        raise ShortageError(
            f"{words} takes more memory than it may have: {ended.reason}",
            hint="raise the limit, or end other programs",
        )


def _not_written(ended: Ended, folder: Path) -> OutputError:
    free = shutil.disk_usage(folder).free
    # A library's own words say nothing of that.
    why = "the disk is full" if free < _FULL else ended.reason
    return OutputError(
        f"the converted model cannot be written, with {free / 1e6:.0f} MB free: {why}",
        hint="make some space, or build to another disk",
    )


def tell_done(share: float) -> None:
    """Tell the build how much is done. Libraries print here as well."""
    sys.stdout.write(f"\n{PROGRAM_DONE}{min(share, 1):.3f}\n")
    sys.stdout.flush()


def telling(first: float, last: float) -> Callable[[float], None]:
    """Return what tells the build how much is done of what takes it from one share to another."""
    return lambda share: tell_done(first + share * (last - first))


@contextmanager
def ending_for_shortage(*, writes: bool = False) -> Iterator[None]:
    """End this program so that the build knows what there was too little of.

    Where it ``writes``, what OpenVINO raises does not say that the disk is full.
    """
    try:
        yield
    except MemoryError as error:
        sys.stderr.write(f"{error or 'out of memory'}\n")
        sys.exit(NO_MEMORY)
    except (OSError, RuntimeError) as error:
        if not writes:
            raise
        sys.stderr.write(f"{error}\n")
        sys.exit(NO_MEMORY if getattr(error, "errno", None) == errno.ENOMEM else NOT_WRITTEN)
