"""The cost of the load generator; run by ``make bench``."""

from __future__ import annotations

from statistics import median

from rich.console import Console
from rich.table import Table

from llmserve_bench.figures import figures_of
from llmserve_bench.measure import Plan, bench
from llmserve_bench.prompts import Prompts
from llmserve_bench.results import Load
from llmserve_bench.targets import Target

from .servers import scripted

ROUNDS = 3
LOADS = {
    "100 per second, whole answers": Load(rate=100, requests=400, arrivals="constant"),
    "400 per second, whole answers": Load(rate=400, requests=1600, arrivals="constant"),
    "25 per second, 16 pieces": Load(rate=25, requests=100, arrivals="constant", stream=True),
    "100 per second, 16 pieces": Load(rate=100, requests=400, arrivals="constant", stream=True),
    "64 at once, whole answers": Load(concurrency=64, requests=1920),
    "64 at once, 16 pieces": Load(concurrency=64, requests=256, stream=True),
}


def cost_table() -> Table:
    """Measure with a server that takes 100 ms to the first piece and 50 ms to each further one."""
    columns = ("load", "requests/s", "of a core", "per request", "per piece", "delay, P99")
    table = Table(*columns, title="What the load generator costs: lowest to highest")
    for label, load in LOADS.items():
        tokens = (1,) * (16 if load.stream else 1)
        model = "pieces" if load.stream else "whole"
        with scripted(first=0.1, gap=0.05, tokens=tokens) as server:
            target = Target(model, server.url)
            runs = [bench(target, load, Plan(Prompts())).runs[0] for _ in range(ROUNDS)]
        rate = median(figures_of(run, load)["requests_per_second"] for run in runs)
        per_request = [run.generator.cpu / len(run.records) * 1e3 for run in runs]
        spreads = {
            "{:.1f} %": [run.generator.busy * 100 for run in runs],
            "{:.2f} ms": per_request,
            "{:.3f} ms": [cost / len(tokens) for cost in per_request],
            "{:.0f} ms": [run.generator.late * 1e3 for run in runs],
        }
        cells = (f"{form.format(min(v))} to {form.format(max(v))}" for form, v in spreads.items())
        table.add_row(label, f"{rate:.0f}", *cells)
    return table


if __name__ == "__main__":
    Console().print(cost_table())
