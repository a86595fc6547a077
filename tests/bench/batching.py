"""What dynamic batching brings: the same requests one after the other and together."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from rich.table import Table

from llmserve.testing import LiveTriton

REQUESTS = 8
TOKENS = 64
ROUNDS = 5
PROMPT = "Programming in C++ is like"


def _measure(live: LiveTriton, model: str, run: Callable[[], object]) -> tuple[float, int]:
    before, began = live.executions(model), time.perf_counter()
    run()
    return time.perf_counter() - began, live.executions(model) - before


def table() -> Table:
    """Ask eight times in both ways, in turns, on the demo model."""
    with tempfile.TemporaryDirectory() as folder, LiveTriton.start(Path(folder) / "r") as live:
        model = live.build("hf")

        def ask(_: int) -> object:
            return live.client.generate(model, PROMPT, max_tokens=TOKENS, ignore_eos=True)

        def together() -> object:
            with ThreadPoolExecutor(REQUESTS) as pool:
                return list(pool.map(ask, range(REQUESTS)))

        ways: dict[str, Callable[[], object]] = {
            "one after the other": lambda: [ask(i) for i in range(REQUESTS)],
            "at the same time": together,
        }
        together()
        seen: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                seen[name].append(_measure(live, model, way))
    base = median(seconds for seconds, _ in next(iter(seen.values())))
    found = Table(
        "way", "tokens/s", "against one by one", "executions",
        title=f"{REQUESTS} requests of {TOKENS} tokens through Triton, demo model",
    )  # fmt: skip
    for name, runs in seen.items():
        seconds = median(seconds for seconds, _ in runs)
        executions = f"{median(count for _, count in runs):g}"
        rate = f"{REQUESTS * TOKENS / seconds:.0f}"
        found.add_row(name, rate, f"{base / seconds:.2f} x", executions)
    return found
