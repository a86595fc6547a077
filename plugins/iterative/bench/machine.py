"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def conditions() -> str:
    """Return processor, cores, versions and date in one line."""
    packages = ("torch", "transformers", "tritonclient", "nvidia-pytriton")
    parts = [
        f"{os.cpu_count()} cores of {_processor()}",
        f"Python {platform.python_version()}",
        *_versions(packages),
        datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    ]
    return ", ".join(parts)


def read_bandwidth(device: str, gigabytes: float = 0.5) -> float:
    """Return the bytes a second at which all cores (or the GPU) read memory, at best."""
    import torch

    buffer = torch.ones(int(gigabytes * 2**30) // 4, device=device)
    times = []
    for _ in range(6):
        begun = time.perf_counter()
        buffer.sum().item()
        times.append(time.perf_counter() - begun)
    return buffer.numel() * 4 / min(times)


def _processor() -> str:
    with_name = Path("/proc/cpuinfo")
    if with_name.exists():
        for line in with_name.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _versions(packages: Iterable[str]) -> Iterable[str]:
    for package in packages:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            yield f"no {package}"
