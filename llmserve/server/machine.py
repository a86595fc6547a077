"""Whether the machine has what a server takes of it; asked before Triton starts, in lines to read.

What is estimated is the least that a server needs: who is told that it is too much can rely on it.
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

from llmserve.errors import ConfigError, LLMServeError, ServerError
from llmserve.repository.manifest import Manifest, model_folders
from llmserve.server.process import scratch_folder
from llmserve.server.settings import ServerSettings

# Measured with Triton 2.51: what it takes of the shared memory, of memory, of files and threads.
_SHARED_OF_PROCESS = 1 << 20
_MEMORY_OF_PROCESS, _MEMORY_OF_ENGINE = 40 << 20, 250 << 20
_SCRATCH = 16
_FILES, _FILES_OF_PROCESS = 112, 4
_THREADS, _THREADS_OF_PROCESS = 100, 8
_MANY_THREADS = 10_000
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_MB = 1 << 20


def shortages(settings: ServerSettings, root: Path = Path("/")) -> list[LLMServeError]:
    """Return what a server would fail for want of; ``root`` is where the system's files are."""
    models = _memory_of_models(settings)
    count = sum(map(len, models.values()))
    found: list[LLMServeError] = []

    def wants(needed: float, there: float, what: str, mend: str) -> None:
        if there < needed:
            told = {"there": there, "needed": needed}
            what = what.format(
                **{n: f"{v:.0f}" if v >= 10 else f"{v:.2g}" for n, v in told.items()}
            )
            found.append(ServerError(what, mend=mend))

    if (root / "dev/shm").is_dir():
        wants(
            count * _SHARED_OF_PROCESS / _MB,
            shutil.disk_usage(root / "dev/shm").free / _MB,
            "/dev/shm has {there} MB left, and the models' processes need {needed}",
            "mount -o remount,size=1g /dev/shm, or in Docker --shm-size 1g",
        )
    if (scratch := scratch_folder()).is_dir():
        wants(
            _SCRATCH,
            shutil.disk_usage(scratch).free / _MB,
            f"{scratch} has {{there}} MB left, and a server needs {{needed}}",
            "make room there, or set TMPDIR to another folder",
        )
    wants(
        _FILES + count // settings.replicas * _FILES_OF_PROCESS,
        _limit(resource.RLIMIT_NOFILE),
        "{there} files may be open at a time, and a server of these models needs {needed}",
        "ulimit -n 4096",
    )
    wants(
        settings.replicas * _THREADS + count * _THREADS_OF_PROCESS,
        _threads_left(root),
        "{there} more processes may be started, and a server of these models needs {needed}",
        "ulimit -u 4096, or a container with a higher --pids-limit",
    )
    wants(
        sum(map(sum, models.values())) / _MB,
        memory(root)[1] / _MB,
        "there are {there} MB of memory in all, and the models need {needed}",
        "serve fewer with --model, or build them smaller",
    )
    return found


def note_of_memory(settings: ServerSettings, root: Path = Path("/")) -> str | None:
    """Say where models take more memory than is free; what others hold they may yet give back."""
    models = {name: sum(each) / _MB for name, each in _memory_of_models(settings).items()}
    free = memory(root)[0] / _MB
    if (needed := sum(models.values())) <= free:
        return None
    most = max(models, key=lambda name: models[name])
    return (
        f"the models need {needed:.0f} MB of memory or more ({most} {models[most]:.0f}), and "
        f"{free:.0f} are free: serve fewer with --model"
    )


def memory(root: Path = Path("/")) -> tuple[float, float]:
    """Return how much memory is free and how much there is, of this machine or this container."""
    free, total = float("inf"), float("inf")
    with suppress(OSError, ValueError, KeyError):
        table = dict(line.split(":") for line in _read(root / "proc/meminfo").splitlines())
        free, total = (int(table[key].split()[0]) * 1024.0 for key in ("MemAvailable", "MemTotal"))
    group = root / "sys/fs/cgroup"
    with suppress(OSError, ValueError):
        most, held = (float(_read(group / f"memory.{name}")) for name in ("max", "current"))
        stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
        # What was read from files is given back when it is wanted.
        free = min(free, most - held + float(stat.get("inactive_file", 0)))
        total = min(total, most)
    return free, total


def _memory_of_models(settings: ServerSettings) -> dict[str, list[int]]:
    """Estimate what each process of each model takes: a base, and the weights as they are loaded.

    Of models that somebody else wrote nothing is known but that each is a process.
    """
    from llmserve.repository import config

    found = {}
    for folder in model_folders(settings.repository):
        if settings.models and folder.name not in settings.models:
            continue
        with suppress(ConfigError, OSError):
            told = config.read(folder)
            if not told.ensemble_scheduling.step:
                processes = sum(max(1, group.count) for group in told.instance_group) or 1
                each = [_memory_of_process(folder)] * processes
                found[folder.name] = each * settings.replicas
    return found


def _memory_of_process(folder: Path) -> int:
    manifest = Manifest.read(folder)
    engine = manifest.components.get("generator") if manifest else None
    if not engine:
        return _MEMORY_OF_PROCESS
    asked: Mapping[str, Any] = engine["settings"]
    base = _MEMORY_OF_PROCESS + _MEMORY_OF_ENGINE
    if asked.get("device") != "cpu" and Path("/dev/nvidiactl").exists():
        return base
    weights = folder / "1" / asked.get("path", "")
    size: int = sum(file.stat().st_size for file in weights.rglob("*") if file.is_file())
    with suppress(OSError, ValueError, KeyError):
        told = json.loads((weights / "config.json").read_text(encoding="utf-8"))
        stored = _BYTES[told.get("dtype") or told.get("torch_dtype")]
        size = size * _BYTES[str(asked["dtype"])] // stored
    return base + size


def _limit(which: int) -> float:
    most = resource.getrlimit(which)[0]
    return float("inf") if most == resource.RLIM_INFINITY else most


def _threads_left(root: Path) -> float:
    """Return how many threads this user, or this container, may still start."""
    left = float("inf")
    with suppress(OSError, ValueError):
        pids = [root / f"sys/fs/cgroup/pids.{name}" for name in ("max", "current")]
        most, now = (float(_read(path)) for path in pids)
        left = most - now
    if os.geteuid() and (most := _limit(resource.RLIMIT_NPROC)) < _MANY_THREADS:
        left = min(left, most - sum(_threads_of_user(root)))
    return left


def _threads_of_user(root: Path) -> Iterator[int]:
    for process in (root / "proc").glob("[0-9]*"):
        with suppress(OSError):
            if process.stat().st_uid == os.geteuid():
                yield len(list((process / "task").iterdir()))


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace")
