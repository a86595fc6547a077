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

from llmserve.hardware import gpu_memory, has_gpu, memory
from llmserve.plugins.registry import Registry
from llmserve.problems import Problem
from llmserve.repository.needs import needs_of, smaller
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
    models, registry = _served(settings), Registry.load()
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
        sum(expected_memory(model, registry) for model in models) * settings.replicas / _MB,
        memory(root).total / _MB,
        "there are {available} MB of memory in all, and the models need {needed}",
        "serve fewer with --model, or build them smaller",
    )
    return problems


def note_of_memory(settings: ServerSettings, root: Path = Path("/")) -> str | None:
    """Return a note if models need more memory than is free; other programs may yet free some."""
    served, registry = {model.name: model for model in _served(settings)}, Registry.load()
    needs = {
        name: needed_memory(model, registry) * settings.replicas for name, model in served.items()
    }
    free = memory(root).free
    if (needed := sum(needs.values())) <= free:
        return None
    largest = max(needs, key=lambda name: needs[name])
    others = needed - needs[largest]
    instead = _instead(served[largest], registry, (free - others) / settings.replicas)
    return (
        f"the models need {needed / _MB:.0f} MB of memory or more ({largest} "
        f"{needs[largest] / _MB:.0f}), and {free / _MB:.0f} are free: serve fewer with --model"
        f"{', or ' + instead if instead else ''}"
    )


def note_of_guesses(settings: ServerSettings) -> str | None:
    """Return a note if models were not built by llmserve, so that their memory is guessed."""
    guessed = {
        model.name: first_memory(model) * settings.replicas
        for model in _served(settings)
        if not model.manifest and model.is_python
    }
    if not guessed:
        return None
    sizes = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in guessed.items())
    return (
        f"what others wrote is taken to need the size of its files until it was loaded once and "
        f"measured ({sizes}); what it reads from elsewhere is not known"
    )


def too_large(model: Model, registry: Registry, root: Path = Path("/")) -> Problem | None:
    """Return that a model needs more memory than is free, and what would need less."""
    needed, free = needed_memory(model, registry), memory(root).free
    needs = needs_of(model, registry)
    what = "GB of memory"
    if needs and needs.of_gpu and has_gpu(root) and (gpus := [gpu.free for gpu in gpu_memory()]):
        of_gpu = sum(gpus) if needs.on_all_gpus else max(gpus)
        if needs.of_gpu > of_gpu:
            needed, free, what = needs.of_gpu, of_gpu, "GB of a GPU's memory"
    if needed <= free:
        return None
    return Problem(
        model.name,
        f"it needs {needed / 1e9:.1f} {what}, and {free / 1e9:.1f} are free",
        _instead(model, registry, free) or "serve it on a larger machine",
        fatal=False,
        code="server",
    )


def _instead(model: Model, registry: Registry, free: float) -> str:
    """Say how to build a model so that it fits, "" if no option makes it so."""
    for each in smaller(model, registry):
        needed = each.needs.of_gpu or each.needs.served
        if needed <= free:
            return f"build {model.name} with {each}, which needs {needed / 1e9:.1f} GB"
    return ""


def resources() -> str:
    """Say how much this machine has to do, and what it has left.

    It is for who looks for the reason of an end that has none.
    """
    found = memory()
    busy, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return (
        f"{busy:.1f} processes want the {processors} processors, "
        f"and {found.free / _MB:.0f} of {found.total / _MB:.0f} MB of memory are free"
    )


def expected_memory(model: Model, registry: Registry | None = None) -> int:
    """Estimate the memory of a model, with all of its processes; it may need more.

    Of one that llmserve did not build, only the number of its processes is known. What Triton
    itself runs has none, and takes at least the size of its files.
    """
    if model.damage or model.config is None:
        return 0
    with suppress(OSError):
        if model.runs_in_triton:
            return _memory_of_graph(model)
        return _memory_of_process(model, registry or Registry.load()) * _processes_of(model)
    return 0


def first_memory(model: Model) -> int:
    """Return what a model is taken to need until it was loaded once, and could be measured.

    Of one that llmserve did not build, nothing says what it reads: each of its processes is taken
    to hold the files of its version. That may be more than it needs, so no shortage follows of it.
    """
    least = expected_memory(model)
    if model.config is None or model.damage or model.manifest or not model.is_python:
        return least
    groups = model.config.instance_group
    if has_gpu() and not (groups and all(group.kind == group.KIND_CPU for group in groups)):
        return least
    with suppress(OSError):
        return least + _size(model.last_version) * _processes_of(model)
    return least


def needed_memory(model: Model, registry: Registry) -> int:
    """Return what a model needs to do all that it says it does, such as a whole context."""
    needs = needs_of(model, registry)
    return max(expected_memory(model, registry), needs.served if needs else 0)


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
    if not (is_on_cpu and model.manifest) and has_gpu():
        return 0
    return _size(model.last_version)


def _memory_of_process(model: Model, registry: Registry) -> int:
    engine = model.manifest.components.get("generator") if model.manifest else None
    if not engine:
        return _MEMORY_OF_PROCESS
    engine_settings: Mapping[str, Any] = engine["settings"]
    base = _MEMORY_OF_PROCESS + _MEMORY_OF_ENGINE
    if needs := needs_of(model, registry):
        return base + (0 if needs.on_gpu else needs.weights)
    if engine_settings.get("device") != "cpu" and has_gpu():
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
