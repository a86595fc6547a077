"""Keep watch over one server: run as a script, in a process of its own.

The first line on its stdin is a JSON object with the fields of :class:`Watch`; it holds the key
of the restricted interfaces, which an argument would show to every user of the machine. The
guard starts the server, tells its process id on stdout and waits. When stdin closes, when a
line with a number of seconds comes, or when the process that started it is gone, it ends the
server: SIGTERM, then SIGKILL to its process group. Whatever way the server ended, its
shared memory and its scratch folder are removed. So nothing is left behind even where the
process that started the server was killed and could not clean up.

Its only argument is the server's name, for whoever lists processes. Only the standard library
is used, since it runs isolated from every installed package.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOCK = "lock"
"""A file in the scratch folder that is locked for as long as the guard, or what it has started,
lives."""
PR_SET_PDEATHSIG = 1
_ABANDONED = 1.0
"""Seconds to end in order once the process that started the server is gone."""
_REPORTED = 2.0
"""Seconds after which a model's process loads its weights, and Triton notices its death."""
_GIVING_UP = 8.0
"""Seconds for a server that is loading models to end in order after they were killed."""


@dataclass(frozen=True)
class Watch:
    """What is watched and what is removed afterwards."""

    argv: Sequence[str]
    parent: int
    scratch: str
    shm_prefix: str
    grace: float
    last_resort: Sequence[str]


def main() -> int:
    """Run the server until it ends or has to; return its exit code as a shell would."""
    watch = Watch(**json.loads(_first_line()))
    alarm = _signals_as_bytes()
    libc = ctypes.CDLL(None, use_errno=True)
    # Held by all that is started here: who finds it free may remove what is left of them.
    lock = os.open(Path(watch.scratch, LOCK), os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)

    def end_with_the_guard() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    try:
        server = subprocess.Popen(
            watch.argv,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            cwd=watch.scratch,
            start_new_session=True,
            pass_fds=[lock],
            # Safe here and only here: this process has one thread, which lives as long as it.
            preexec_fn=end_with_the_guard,
        )
        os.write(1, b"%d\n" % server.pid)
        _run_until_told(server, watch, alarm)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        code = server.wait()
    finally:
        if watch.last_resort:
            subprocess.run(watch.last_resort, capture_output=True, timeout=30, check=False)
        remove_leftovers(watch.shm_prefix, watch.scratch)
    return code if code >= 0 else 128 - code


def _first_line() -> bytes:
    """Read no further than that: what follows is for select to wake up for."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            raise SystemExit("the process that starts the server ended before it said which")
        line += byte
    return line


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
        orders = [_ABANDONED] if os.getppid() != watch.parent else []
        if alarm in ready and set(os.read(alarm, 64)) - {signal.SIGCHLD}:
            orders.append(watch.grace)
        if 0 in ready:
            lines = os.read(0, 4096).split()
            if not lines:
                sources.remove(0)
                orders.append(_ABANDONED)
            orders += [float(line) for line in lines]
        if orders and deadline == float("inf"):
            _end_loading(server, _GIVING_UP if min(orders) > 0 else 0.0, set(sources) & {0})
            server.terminate()
        deadline = min([deadline, *(time.monotonic() + grace for grace in orders)])


def _end_loading(server: subprocess.Popen[bytes], patience: float, orders: set[int]) -> None:
    """Make a server that still loads its models give up by itself.

    Until they are loaded SIGTERM would kill it on the spot, and the folder
    ``/tmp/python_env_…`` that it has made, whose name only it knows, would stay. When the
    processes that load the models are killed, it ends in order. A further order cuts this short.
    """
    deadline = time.monotonic() + patience
    while server.poll() is None and time.monotonic() < deadline and not _heeds(server.pid):
        for process in members(server.pid) - {server.pid}:
            # Before that it completes the configuration, and Triton would wait for it for ever.
            with suppress(OSError, IndexError):
                if _age(process) > _REPORTED:
                    os.kill(process, signal.SIGKILL)
        if select.select(orders, [], [], 0.05)[0]:
            return


def _age(process: int) -> float:
    started = int(state_of(process)[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _heeds(process: int) -> bool:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return True


def members(group: int) -> set[int]:
    """Return the processes of a group."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(entry.name)) == group:
                found.add(int(entry.name))
    return found


def state_of(process: int) -> list[str]:
    """Return the fields of a process's line of state; none where it is gone."""
    try:
        line = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # Counted behind the program's name, which may hold spaces itself.
    return line.rpartition(")")[2].split()


def remove_leftovers(name: str, scratch: str | Path) -> None:
    """Remove a server's shared memory and its scratch folder."""
    for segment in Path("/dev/shm").glob(f"{name}*"):
        segment.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
