"""What commands cost before they do anything, and what the load generator costs.

Run by ``make bench``; the figures are of one run, and waking up a process is dear on a virtual
machine.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from llmserve_bench.figures import figures_of
from llmserve_bench.measure import Plan, bench
from llmserve_bench.results import Load
from llmserve_bench.schedule import Prompts
from llmserve_bench.targets import Target

from .scripted_triton import scripted

ROUNDS = 3
LOADS = {
    "100 a second, whole answers": Load(rate=100, requests=400, arrivals="constant"),
    "400 a second, whole answers": Load(rate=400, requests=1600, arrivals="constant"),
    "25 a second, 16 pieces": Load(rate=25, requests=100, arrivals="constant", stream=True),
    "100 a second, 16 pieces": Load(rate=100, requests=400, arrivals="constant", stream=True),
    "64 at a time, whole answers": Load(concurrency=64, requests=1920),
    "64 at a time, 16 pieces": Load(concurrency=64, requests=256, stream=True),
}


def start_up() -> Table:
    llmserve = str(Path(sys.executable).with_name("llmserve"))
    commands = {
        'python -c "import click"': [sys.executable, "-c", "import click"],
        "llmserve --help": [llmserve, "--help"],
        "llmserve plugins": [llmserve, "plugins"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(20):
        # In turns, so that what disturbs the machine disturbs all alike.
        for name, command in commands.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            times[name].append(time.perf_counter() - began)
    base = median(next(iter(times.values())))
    table = Table("command", "median", "against import click", title="Start-up")
    for name, values in times.items():
        table.add_row(name, f"{median(values) * 1000:.0f} ms", f"{median(values) / base:.2f} x")
    return table


def generator() -> Table:
    """Measure against a server that takes 100 ms to the first piece and 50 ms to each other."""
    columns = ("load", "requests/s", "of a core", "a request", "a piece", "late, P99")
    table = Table(*columns, title="What the load generator costs: lowest to highest")
    for label, load in LOADS.items():
        tokens = (1,) * (16 if load.stream else 1)
        busy, rates, requests, late = [], [], [], []
        for _ in range(ROUNDS):
            with scripted(first=0.1, gap=0.05, tokens=tokens) as server:
                model = "pieces" if load.stream else "whole"
                (run,) = bench(Target(model, server.url), load, Plan(Prompts())).runs
            busy.append(run.generator.busy * 100)
            rates.append(figures_of(run, load)["requests_per_second"])
            requests.append(run.generator.cpu / len(run.records) * 1e3)
            late.append(run.generator.late * 1e3)
        table.add_row(
            label,
            f"{median(rates):.0f}",
            f"{min(busy):.1f} to {max(busy):.1f} %",
            f"{min(requests):.2f} to {max(requests):.2f} ms",
            f"{min(requests) / len(tokens):.2f} to {max(requests) / len(tokens):.2f} ms",
            f"{min(late):.0f} to {max(late):.0f} ms",
        )
    return table


if __name__ == "__main__":
    console = Console()
    console.print(start_up())
    console.print(generator())
