"""How many threads compute on a CPU: as many as in vLLM's own server."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_THREADS = "OMP_NUM_THREADS"
_RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"
_CPUS = Path("/sys/devices/system/cpu")


def variables() -> dict[str, str]:
    """Return the number of threads for vLLM on a CPU, unless somebody has chosen one.

    It is one for each core but one, which is left to the server, as vLLM does for its own worker
    processes; it has no way to do so for an engine that is not in a process of its own. With a
    thread on every core, all of them wait in each part of a layer while one of them does not run.
    """
    if _THREADS in os.environ or not _is_for_cpus():
        return {}
    reserved = os.environ.get(_RESERVED, "")
    return {_THREADS: str(max(1, _cores() - (int(reserved) if reserved.isdigit() else 1)))}


def _is_for_cpus() -> bool:
    """Whether the installed vLLM is for CPUs, which its version tells, also to vLLM itself."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return False


def _cores() -> int:
    """Return the number of cores that this process may use; hyperthreads share one."""
    return len({_core_of(cpu) for cpu in os.sched_getaffinity(0)})


def _core_of(cpu: int) -> tuple[str, ...]:
    folder = _CPUS / f"cpu{cpu}" / "topology"
    try:
        names = ("physical_package_id", "core_id")
        return tuple((folder / name).read_text(encoding="ascii") for name in names)
    except OSError:
        return (str(cpu),)
