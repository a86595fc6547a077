"""Guards one server: a script that runs as a separate process.

The first line on its stdin is a JSON object with the fields of :class:`Guarded`. The guard
starts the server, prints its process id and waits. When stdin closes, when a line with a number of
seconds arrives, or when the guard's parent process is gone, it ends the server with SIGTERM, then
SIGKILL to its process group. However the server ends, the guard removes its shared memory and its
scratch folder, so nothing is left behind even if the parent was killed and could not clean up.

Its only argument is the server's name, so that it is visible in process lists. The script uses
only the standard library, since it runs isolated from all installed packages.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOCK = "lock"
"""A file in the scratch folder that is locked as long as the guard or any of its children lives."""
ZOMBIE = "Z"
"""The state of a process that has ended and that its parent has not asked about."""
PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_ABANDONED = 1.0
"""Seconds for an orderly shutdown once the parent process is gone."""
_MIN_AGE = 2.0
"""Age in seconds from which a model's process loads its weights and Triton notices its death."""
_LOADING_GRACE = 8.0
"""Seconds for an orderly shutdown of a server whose loading models were killed."""


@dataclass(frozen=True)
class Guarded:
    """The command to guard, and what to remove afterwards."""

    argv: Sequence[str]
    parent: int
    scratch: str
    shm_prefix: str
    grace: float
    last_resort: Sequence[str]


def main() -> int:
    """Run the server until it ends or must end; return its exit code as a shell would."""
    # Prompts are in the shared memory of Triton's models, in sockets, and in what models write.
    os.umask(0o077)
    watch = Guarded(**json.loads(_first_line()))
    alarm = _signals_as_bytes()
    libc = ctypes.CDLL(None, use_errno=True)
    # All child processes inherit the lock: once it is free, their leftovers may be removed.
    lock = os.open(Path(watch.scratch, LOCK), os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)

    # A container, which outlives this process, has shared memory of its own.
    here = not watch.last_resort
    if here:
        _load_cuda_module()
    program = _program()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if here and not (program and _obey(libc, program)):
            os.write(2, _READABLE)

    try:
        server = subprocess.Popen(
            watch.argv,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            cwd=watch.scratch,
            start_new_session=True,
            pass_fds=[lock],
            # Safe only here: this process has a single thread, which lives as long as the process.
            preexec_fn=prepare,
        )
        os.write(1, b"%d\n" % server.pid)
        _wait_for_end(server, watch, alarm)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        code = server.wait()
    finally:
        clean_up(watch)
    return code if code >= 0 else 128 - code


class _Filter(ctypes.Structure):
    """A program for the kernel, which decides over system calls."""

    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


# The instructions of BPF that it needs: load a word, compare it, and return.
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ANSWER_ZERO = 0x7FFF0000, 0x00050000
_CALL, _ARCHITECTURE, _SECOND_ARGUMENT = 0, 4, 24
"""Where the kernel has what it decides on."""
_FCHMOD = {"x86_64": (0xC000003E, 91), "aarch64": (0xC00000B7, 52)}
_PUBLIC = 0o644


def _program() -> _Filter | None:
    """Return the filter that keeps shared memory private, or None for an unknown processor.

    The kernel leaves out the call that opens it (workarounds.PUBLIC_MEMORY), and reports that it
    went well.
    """
    if not (numbers := _FCHMOD.get(os.uname().machine)):
        return None
    architecture, call = numbers
    instructions = (
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 0, 5, architecture),
        (_LOAD, 0, 0, _CALL),
        (_EQUAL, 0, 3, call),
        (_LOAD, 0, 0, _SECOND_ARGUMENT),
        (_EQUAL, 0, 1, _PUBLIC),
        (_RETURN, 0, 0, _ANSWER_ZERO),
        (_RETURN, 0, 0, _ALLOW),
    )
    code = b"".join(struct.pack("HBBI", *each) for each in instructions)
    return _Filter(len(instructions), code)


def _obey(libc: ctypes.CDLL, program: _Filter) -> bool:
    """Have the kernel apply a filter to this process and its children, if it can."""
    # It takes none from a process that could gain rights afterwards.
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return not libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)


_READABLE = b"llmserve: note: other users of this machine can read prompts in /dev/shm\n"


def _load_cuda_module() -> None:
    """Load what CUDA would load itself, with a program that gains rights."""
    if program := shutil.which("nvidia-modprobe"):
        with suppress(OSError, subprocess.TimeoutExpired):
            # Not the guard's own: its orders come from there, and its parent reads what it says.
            subprocess.run(
                [program, "-u", "-c", "0"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                timeout=30,
                check=False,
            )


def _first_line() -> bytes:
    """Read a single line from stdin; select must still wake up for the lines after it."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            raise SystemExit("stdin closed before it named the server to start")
        line += byte
    return line


def _signals_as_bytes() -> int:
    """Return a descriptor from which each handled signal is read as one byte."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return readable


def _wait_for_end(server: subprocess.Popen[bytes], watch: Guarded, alarm: int) -> None:
    """Return when the server has ended or its grace period is over."""
    sources = [0, alarm]
    deadline = float("inf")
    while server.poll() is None and time.monotonic() < deadline:
        remaining = deadline - time.monotonic()
        ready, _, _ = select.select(sources, [], [], max(0.0, min(1.0, remaining)))
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
            _end_loading(server, _LOADING_GRACE if min(orders) > 0 else 0.0, set(sources) & {0})
            server.terminate()
        deadline = min([deadline, *(time.monotonic() + grace for grace in orders)])


def _end_loading(server: subprocess.Popen[bytes], timeout: float, orders: set[int]) -> None:
    """Make a server that is still loading its models shut down on its own.

    SIGTERM would leave a folder whose name only the server knows (workarounds.SIGTERM_LOADING). If
    the processes that load the models are killed, it shuts down in order. Another order on stdin
    cuts this short.
    """
    deadline = time.monotonic() + timeout
    while server.poll() is None and time.monotonic() < deadline and not _handles_term(server.pid):
        for process in members(server.pid) - {server.pid}:
            # A younger process completes the configuration (workarounds.FILES_GONE).
            with suppress(OSError, IndexError):
                if _age(process) > _MIN_AGE:
                    os.kill(process, signal.SIGKILL)
        if select.select(orders, [], [], 0.05)[0]:
            return


def _age(process: int) -> float:
    started = int(state_of(process)[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _handles_term(process: int) -> bool:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return True


def members(group: int) -> set[int]:
    """Return the processes of a group.

    All of the machine are looked at, four times a second: a glob takes nearly twice as long.
    """
    processes = set()
    with os.scandir("/proc") as entries:
        for entry in entries:
            with suppress(ValueError, OSError):
                if os.getpgid(process := int(entry.name)) == group:
                    processes.add(process)
    return processes


def state_of(process: int) -> list[str]:
    """Return the fields of a process's ``stat`` line after its name; none if it is gone."""
    try:
        line = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # Split after the program's name, which may contain spaces.
    return line.rpartition(")")[2].split()


def name_of_signal(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def clean_up(watch: Guarded) -> None:
    """Remove everything of a server that has ended."""
    if watch.last_resort:
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(watch.last_resort, capture_output=True, timeout=30, check=False)
    remove_leftovers(watch.shm_prefix, watch.scratch)


def remove_leftovers(name: str, scratch: str | Path) -> None:
    """Remove a server's shared memory and its scratch folder.

    The lock is last: if this process is killed meanwhile, who finds the lock goes on.
    """
    for segment in Path("/dev/shm").glob(f"{name}*"):
        segment.unlink(missing_ok=True)
    with suppress(OSError):
        for path in Path(scratch).iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
