"""What a command costs before it does anything, as whole processes, in turns."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.table import Table

ROUNDS = 20


def _seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def table() -> Table:
    """Measure in turns, so that what disturbs the machine disturbs all alike."""
    llmserve = str(Path(sys.executable).with_name("llmserve"))
    with tempfile.TemporaryDirectory() as folder:
        build = ["build", "--plugin", "hf", "--model", "demo", "--output", f"{folder}/repository"]
        commands = {
            'python -c "import click"': [sys.executable, "-c", "import click"],
            "llmserve --help": [llmserve, "--help"],
            "llmserve plugins": [llmserve, "plugins"],
            "llmserve build (demo model)": [llmserve, *build],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, command in commands.items():
                times[name].append(_seconds(command))
    base = median(next(iter(times.values())))
    found = Table("command", "median", "against import click", title="Start-up")
    for name, values in times.items():
        found.add_row(name, f"{median(values) * 1000:.0f} ms", f"{median(values) / base:.2f} x")
    return found
