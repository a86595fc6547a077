"""What a measurement ran on, in a few words."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from llmserve import __version__


def machine(proc: Path = Path("/proc")) -> dict[str, str]:
    """Describe this machine; a processor or device that the system does not name is left out."""
    told = {
        "cores": str(os.cpu_count()),
        "cpu": _named(proc / "cpuinfo", "model name"),
        "gpu": " and ".join(
            _named(path, "Model") for path in sorted(proc.glob("driver/nvidia/gpus/*/information"))
        ),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "llmserve": __version__,
    }
    return {key: value for key, value in told.items() if value}


def _named(path: Path, key: str) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    parts = (line.partition(":") for line in lines)
    return next((" ".join(value.split()) for name, _, value in parts if name.strip() == key), "")
