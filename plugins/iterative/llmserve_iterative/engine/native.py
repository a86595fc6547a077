"""Kernels in C, compiled once for the processor that runs them, where there is a compiler.

Without one everything works as well, through PyTorch's own operations.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOG = logging.getLogger(__name__)

_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    # What -ffast-math has, but for what would change the whole process's arithmetic.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-fopenmp",
    "-fPIC",
)
_PATIENCE = 120.0


def load_library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or nothing where they cannot be had."""
    try:
        return ctypes.CDLL(str(_compiled(sorted(Path(__file__).parent.glob("*.c")))))
    except (OSError, subprocess.SubprocessError) as error:
        LOG.info("no kernels of our own: %s", getattr(error, "stderr", None) or error)
        return None


def processor_has(flag: str) -> bool:
    """Whether Linux says that the processor can do that."""
    return flag in _processor().split()


def _compiled(sources: Sequence[Path]) -> Path:
    """Return the library, from the user's cache if it is there already."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise FileNotFoundError("no C compiler on the path")
    openmp = _openmp()
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_PATIENCE)
    texts = [source.read_bytes() for source in sources]
    made_of: tuple[Any, ...] = (texts, version.stdout, _FLAGS, openmp, _processor())
    name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    target = _cache() / f"kernels-{name}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        library = Path(folder) / "kernels.so"
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        commands = [
            [compiler, *_FLAGS, "-c", str(source), "-o", compiled]
            for source, compiled in zip(sources, objects, strict=True)
        ]
        # PyTorch brings an OpenMP of its own. A second one in the same process would have
        # threads of its own, and both would fight for the cores.
        commands.append([compiler, "-shared", *objects, openmp, "-lm", "-o", str(library)])
        for command in commands:
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PATIENCE)
        library.replace(target)
    return target


def _openmp() -> str:
    """Return the OpenMP that PyTorch has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libgomp"):
            return path
    raise FileNotFoundError("this PyTorch uses an OpenMP that is not GNU's")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags}"


def _cache() -> Path:
    """Return a folder for what is compiled, which nobody else can write to."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "llmserve" / "iterative"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
