"""Keep watch over one server: run as a script, in a process of its own.

It starts the server, tells its process id on stdout and waits. When stdin closes, when a
number of seconds is written to it, or when the process that started it is gone, it ends the
server: SIGTERM, then SIGKILL to its process group. Whatever way the server ended, its
shared memory and its scratch folder are removed. So nothing is left behind even where the
process that started the server was killed and could not clean up.

The only argument is a JSON object with the fields of :class:`Watch`. Only the standard
library is used, since it runs isolated from every installed package.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Watch:
    """What is watched and what is removed afterwards."""

    argv: list[str]
    parent: int
    scratch: str
    shm_prefix: str
    grace: float
    last_resort: list[str]


def main() -> int:
    """Run the server until it ends or has to; return its exit code as a shell would."""
    watch = Watch(**json.loads(sys.argv[1]))
    alarm = _signals_as_bytes()
    libc = ctypes.CDLL(None, use_errno=True)

    def end_with_the_guard() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    try:
        server = subprocess.Popen(
            watch.argv,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            cwd=watch.scratch,
            start_new_session=True,
            # Safe here and only here: this process has one thread, which lives as long as it.
            preexec_fn=end_with_the_guard,
        )
        os.write(1, b"%d\n" % server.pid)
        _run_until_told(server, watch, alarm)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        code = server.wait()
    finally:
        _remove_leftovers(watch)
    return code if code >= 0 else 128 - code


def _signals_as_bytes() -> int:
    """Return a descriptor from which each signal that matters is read as one byte."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return readable


def _run_until_told(server: subprocess.Popen[bytes], watch: Watch, alarm: int) -> None:
    """Return when the server has ended or its time is over."""
    sources = [0, alarm]
    deadline = float("inf")
    while server.poll() is None and time.monotonic() < deadline:
        left = deadline - time.monotonic()
        ready, _, _ = select.select(sources, [], [], max(0.0, min(1.0, left)))
        orders = [watch.grace] if os.getppid() != watch.parent else []
        if alarm in ready and set(os.read(alarm, 64)) - {signal.SIGCHLD}:
            orders.append(watch.grace)
        if 0 in ready:
            text = os.read(0, 64)
            if not text:
                sources.remove(0)
            orders.append(float(text) if text.strip() else watch.grace)
        if orders and deadline == float("inf"):
            server.terminate()
        deadline = min([deadline, *(time.monotonic() + grace for grace in orders)])


def _remove_leftovers(watch: Watch) -> None:
    if watch.last_resort:
        subprocess.run(watch.last_resort, capture_output=True, timeout=30, check=False)
    for segment in Path("/dev/shm").glob(f"{watch.shm_prefix}*"):  # noqa: S108
        segment.unlink(missing_ok=True)
    shutil.rmtree(watch.scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
