"""What the load generator costs; run by ``make bench``."""

from __future__ import annotations

from statistics import median

from rich.console import Console
from rich.table import Table

from llmserve_bench.figures import figures_of
from llmserve_bench.measure import Plan, bench
from llmserve_bench.prompts import Prompts
from llmserve_bench.results import Load
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


def table() -> Table:
    """Measure against a server that takes 100 ms to the first piece and 50 ms to each other."""
    columns = ("load", "requests/s", "of a core", "a request", "a piece", "late, P99")
    made = Table(*columns, title="What the load generator costs: lowest to highest")
    for label, load in LOADS.items():
        tokens = (1,) * (16 if load.stream else 1)
        model = "pieces" if load.stream else "whole"
        with scripted(first=0.1, gap=0.05, tokens=tokens) as server:
            target = Target(model, server.url)
            runs = [bench(target, load, Plan(Prompts())).runs[0] for _ in range(ROUNDS)]
        rate = median(figures_of(run, load)["requests_per_second"] for run in runs)
        each = [run.generator.cpu / len(run.records) * 1e3 for run in runs]
        spreads = {
            "{:.1f} %": [run.generator.busy * 100 for run in runs],
            "{:.2f} ms": each,
            "{:.3f} ms": [one / len(tokens) for one in each],
            "{:.0f} ms": [run.generator.late * 1e3 for run in runs],
        }
        cells = (f"{form.format(min(v))} to {form.format(max(v))}" for form, v in spreads.items())
        made.add_row(label, f"{rate:.0f}", *cells)
    return made


if __name__ == "__main__":
    Console().print(table())
