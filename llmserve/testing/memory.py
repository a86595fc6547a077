"""How much memory a program takes that no file backs."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path


def of_cuda() -> int:
    """Return what torch's libraries for GPUs take in a process that uses none (measured)."""
    import torch

    return 0 if torch.version.cuda is None else 130_000_000


def most_memory(command: Sequence[str]) -> int:
    """Run a program, which has to succeed, and return the most bytes that it had."""
    most = 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
        if found := re.search(r"RssAnon:\s*(\d+) kB", status):
            most = max(most, int(found[1]) * 1024)
        time.sleep(0.02)
    assert process.returncode == 0
    return most
