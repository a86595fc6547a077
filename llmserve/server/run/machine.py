"""Checks, before Triton starts, whether the machine has enough resources for a server.

The estimates are lower bounds, so a reported shortage is always real.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmserve.problems import Problem
from llmserve.repository.repository import Model
from llmserve.server.run.process import scratch_folder
from llmserve.server.settings import ServerSettings

# Measured with Triton 2.51: its use of shared memory, memory, open files and threads.
_SHARED_OF_PROCESS = 1 << 20
_MEMORY_OF_PROCESS, _MEMORY_OF_ENGINE = 40 << 20, 250 << 20
_SCRATCH = 16
_FILES, _FILES_OF_PROCESS = 112, 4
_THREADS, _THREADS_OF_PROCESS = 100, 8
_MAX_COUNTED_THREADS = 10_000
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_MB = 1 << 20


def shortages(settings: ServerSettings, root: Path = Path("/")) -> list[Problem]:
    """Return the resources that a server lacks; ``root`` is the system's root folder."""
    models = _served(settings)
    count = sum(map(_processes_of, models)) * settings.replicas
    if settings.runtime == "embedded":
        # Stand-ins do what this Triton has no backends for.
        count += sum(model.runs_in_triton for model in models) * settings.replicas
    problems: list[Problem] = []

    def require(needed: float, available: float, problem: str, hint: str) -> None:
        if available < needed:
            values = {"available": available, "needed": needed}
            problem = problem.format(
                **{n: f"{v:.0f}" if v >= 10 else f"{v:.2g}" for n, v in values.items()}
            )
            problems.append(Problem("", problem, hint, code="server"))

    if (root / "dev/shm").is_dir():
        require(
            count * _SHARED_OF_PROCESS / _MB,
            shutil.disk_usage(root / "dev/shm").free / _MB,
            "/dev/shm has {available} MB left, and the models' processes need {needed}",
            "mount -o remount,size=1g /dev/shm, or in Docker --shm-size 1g",
        )
    if (scratch := scratch_folder()).is_dir():
        require(
            _SCRATCH,
            shutil.disk_usage(scratch).free / _MB,
            f"{scratch} has {{available}} MB left, and a server needs {{needed}}",
            "free some space there, or set TMPDIR to another folder",
        )
    require(
        _FILES + count // settings.replicas * _FILES_OF_PROCESS,
        _limit(resource.RLIMIT_NOFILE),
        "{available} files may be open at once, and a server of these models needs {needed}",
        "ulimit -n 4096",
    )
    require(
        settings.replicas * _THREADS + count * _THREADS_OF_PROCESS,
        _threads_left(root),
        "{available} more processes may be started, and a server of these models needs {needed}",
        "ulimit -u 4096, or a container with a higher --pids-limit",
    )
    require(
        sum(map(expected_memory, models)) * settings.replicas / _MB,
        memory(root)[1] / _MB,
        "there are {available} MB of memory in all, and the models need {needed}",
        "serve fewer with --model, or build them smaller",
    )
    return problems


def note_of_memory(settings: ServerSettings, root: Path = Path("/")) -> str | None:
    """Return a note if models need more memory than is free; other programs may yet free some."""
    models = {m.name: expected_memory(m) * settings.replicas / _MB for m in _served(settings)}
    free = memory(root)[0] / _MB
    if (needed := sum(models.values())) <= free:
        return None
    largest = max(models, key=lambda name: models[name])
    return (
        f"the models need {needed:.0f} MB of memory or more ({largest} {models[largest]:.0f}), and "
        f"{free:.0f} are free: serve fewer with --model"
    )


def memory(root: Path = Path("/")) -> tuple[float, float]:
    """Return the free and the total memory of this machine or this container."""
    free, total = float("inf"), float("inf")
    with suppress(OSError, ValueError, KeyError):
        table = dict(line.split(":") for line in _read(root / "proc/meminfo").splitlines())
        free, total = (int(table[key].split()[0]) * 1024.0 for key in ("MemAvailable", "MemTotal"))
    group = root / "sys/fs/cgroup"
    with suppress(OSError, ValueError):
        limit, used = (float(_read(group / f"memory.{name}")) for name in ("max", "current"))
        stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
        # The kernel reclaims cached file contents on demand.
        free = min(free, limit - used + float(stat.get("inactive_file", 0)))
        total = min(total, limit)
    return free, total


def resources() -> str:
    """Say how much this machine has to do, and what it has left.

    It is for who looks for the reason of an end that has none.
    """
    free, total = (value / _MB for value in memory())
    busy, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return (
        f"{busy:.1f} processes want the {processors} processors, "
        f"and {free:.0f} of {total:.0f} MB of memory are free"
    )


def expected_memory(model: Model) -> int:
    """Estimate the memory of a model, with all of its processes; it may need more.

    Of one that llmserve did not build, only the number of its processes is known. What Triton
    itself runs has none, and takes at least the size of its files.
    """
    if model.damage or model.config is None:
        return 0
    with suppress(OSError):
        if model.runs_in_triton:
            return _memory_of_graph(model)
        return _memory_of_process(model) * _processes_of(model)
    return 0


def _processes_of(model: Model) -> int:
    if model.config is None or model.config.ensemble_scheduling.step or model.runs_in_triton:
        return 0
    return sum(max(1, group.count) for group in model.config.instance_group) or 1


def _served(settings: ServerSettings) -> list[Model]:
    names = settings.names()
    models = [model for model in settings.opened if model.name in names]
    return [model for model in models if not model.damage and model.config is not None]


def _memory_of_graph(model: Model) -> int:
    """Return the size of the files of a model that Triton itself runs."""
    groups = model.config.instance_group if model.config else ()
    is_on_cpu = groups and all(group.kind == group.KIND_CPU for group in groups)
    # TensorRT-LLM's own models say that as well, with an engine in their folder.
    if not (is_on_cpu and model.manifest) and Path("/dev/nvidiactl").exists():
        return 0
    return _size(model.last_version)


def _memory_of_process(model: Model) -> int:
    engine = model.manifest.components.get("generator") if model.manifest else None
    if not engine:
        return _MEMORY_OF_PROCESS
    engine_settings: Mapping[str, Any] = engine["settings"]
    base = _MEMORY_OF_PROCESS + _MEMORY_OF_ENGINE
    if engine_settings.get("device") != "cpu" and Path("/dev/nvidiactl").exists():
        return base
    weights = model.folder / "1" / engine_settings.get("path", "")
    size = _size(weights)
    with suppress(OSError, ValueError, KeyError):
        config = json.loads((weights / "config.json").read_text(encoding="utf-8"))
        stored = _BYTES[config.get("dtype") or config.get("torch_dtype")]
        size = size * _BYTES[str(engine_settings["dtype"])] // stored
    return base + size


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _limit(which: int) -> float:
    limit = resource.getrlimit(which)[0]
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def _threads_left(root: Path) -> float:
    """Return how many threads this user, or this container, may still start."""
    left = float("inf")
    with suppress(OSError, ValueError):
        pids = [root / f"sys/fs/cgroup/pids.{name}" for name in ("max", "current")]
        limit, used = (float(_read(path)) for path in pids)
        left = limit - used
    if os.geteuid() and (limit := _limit(resource.RLIMIT_NPROC)) < _MAX_COUNTED_THREADS:
        left = min(left, limit - sum(_threads_of_user(root)))
    return left


def _threads_of_user(root: Path) -> Iterator[int]:
    for process in (root / "proc").glob("[0-9]*"):
        with suppress(OSError):
            if process.stat().st_uid == os.geteuid():
                yield len(list((process / "task").iterdir()))


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace")
