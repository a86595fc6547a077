"""What this machine, or the container that one is in, has: memory, and instructions for numbers.

Other parts ask here, so that a build, a server and an engine see the same machine.
"""

from __future__ import annotations

import math
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MIB = 1 << 20
_ROOT = Path("/")
_NATIVE = {"bfloat16": ("avx512_bf16", "amx_bf16"), "float16": ("avx512_fp16", "amx_fp16")}
"""Any of these computes in the type; without them each number is made a float32 and back."""
_TAKES = 10.0
"""Seconds within which a process that the system kills is gone, with all of its memory."""
_NVIDIA = "nvidia-smi"
_SPIN_COUNT = "1000"
"""In iterations of GNU OpenMP's loop; a few hundredths of a millisecond."""


@dataclass(frozen=True)
class MachineMemory:
    """Bytes that are free, and that there are in all; infinite if that is not known."""

    free: float
    total: float


def memory(root: Path = _ROOT) -> MachineMemory:
    """Return the memory of this machine or this container; ``root`` is the system's folder."""
    free, total = math.inf, math.inf
    with suppress(OSError, ValueError, KeyError):
        table = dict(line.split(":") for line in _read(root / "proc/meminfo").splitlines())
        free, total = (int(table[key].split()[0]) * 1024.0 for key in ("MemAvailable", "MemTotal"))
    for group in _groups(root):
        with suppress(OSError, ValueError):
            limit, used, reclaimable = group.read()
            free, total = min(free, max(0.0, limit - used + reclaimable)), min(total, limit)
    return MachineMemory(free, total)


def share_cores(environment: MutableMapping[str, str]) -> None:
    """Have the threads of a program with this environment leave a core while they wait.

    Threads that sleep immediately are woken a hundred times in a step of a small model, which
    costs a third of it; threads that spin a few hundredths of a millisecond first hardly ever
    are. Spinning longer gains next to nothing, and programs that share the cores block each other:
    with ten times these iterations, two models are both four times slower than with these, and a
    build beside others takes five times as much of a processor.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


def addresses() -> float:
    """Return how many bytes a process may have in its address space (``ulimit -v``)."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return math.inf if limit == resource.RLIM_INFINITY else float(limit)


def gpu_memory() -> list[MachineMemory]:
    """Return the memory of each GPU; none if they cannot be asked."""
    if not shutil.which(_NVIDIA):
        return []
    query = [_NVIDIA, "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        rows = (map(float, row.split(",")) for row in answer.stdout.splitlines())
        return [MachineMemory(free * _MIB, total * _MIB) for free, total in rows]
    return []


def has_gpu(root: Path = _ROOT) -> bool:
    return (root / "dev/nvidiactl").exists()


def kind_of(device: str) -> str:
    """Return the kind of a device, such as ``cuda`` for ``cuda:1``, and for all GPUs together."""
    return device.partition(":")[0].replace("balanced", "cuda")


def computes_in(dtype: str, root: Path = _ROOT) -> bool:
    """Return whether the processor has instructions for a type of 16 bits."""
    with suppress(OSError):
        flags = re.search(r"(?m)^flags\s*:(.*)$", _read(root / "proc/cpuinfo"))
        return flags is not None and bool({*flags[1].split()} & {*_NATIVE.get(dtype, ())})
    return False


class MemoryKills:
    """Tells whether the system has just killed a process for want of memory.

    It counts such kills; who watches processes has them noted meanwhile.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._noted = self._count()
        self._last = -math.inf

    def note(self) -> None:
        if (count := self._count()) != self._noted:
            self._noted, self._last = count, time.monotonic()

    def happened(self) -> bool:
        self.note()
        return time.monotonic() - self._last < _TAKES

    def _count(self) -> int:
        """Return how often that has happened on this machine, and in this container."""
        count = 0
        for path in (self._root / "proc/vmstat", *(g.kills for g in _groups(self._root))):
            with suppress(OSError, ValueError):
                lines = _read(path).splitlines()
                count += sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return count


@dataclass(frozen=True)
class _Group:
    """A control group of processes, whose memory may be limited."""

    folder: Path
    limit: str
    used: str
    reclaimable: tuple[str, ...]
    events: str

    @property
    def kills(self) -> Path:
        return self.folder / self.events

    def read(self) -> tuple[float, float, float]:
        """Return the limit, what is used, and what of that the kernel takes back on demand."""
        limit, used = (float(_read(self.folder / name)) for name in (self.limit, self.used))
        stat = dict(line.split() for line in _read(self.folder / "memory.stat").splitlines())
        return limit, used, sum(float(stat.get(name, 0)) for name in self.reclaimable)


# Cached contents of files are reclaimed, those that were read more than once as well.
_SECOND = ("memory.max", "memory.current", ("inactive_file", "active_file"), "memory.events")
_FIRST = (
    "memory.limit_in_bytes", "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"), "memory.oom_control",
)  # fmt: skip


def _groups(root: Path) -> Iterator[_Group]:
    """Yield the groups that this process is in, of both versions, each with those above it."""
    seen = set()
    top = root / "sys/fs/cgroup"
    places = [(top, "", _SECOND), (top / "memory", "", _FIRST)]
    with suppress(OSError):
        for line in _read(root / "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                places.append((top, path, _SECOND))
            elif "memory" in controllers.split(","):
                places.append((top / "memory", path, _FIRST))
    for base, path, names in places:
        folder = base / path.strip("/")
        # In a container, the path may be that of the host, which is not here.
        for each in (folder, *folder.parents):
            if each.is_relative_to(base) and each not in seen and (each / names[0]).is_file():
                seen.add(each)
                yield _Group(each, *names)


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace")
