"""What the load generator of ``llmserve bench`` costs: processor time of its process.

A server that works to a time table answers in one piece or in many, each a message of one token.
Asked 100 times a second, the share of a core is what 100 requests a second cost: 100 messages in
one piece, 1,600 of 16 pieces. Of other loads the table works it out. Asked 64 at a time, it shows
whether as many are really under way. Counted is all that the process does from the first request to
the last answer, in the system as well, and nothing of what starts it or reads its notes.

To wake up at all costs something, on a virtual machine many times what it costs elsewhere. So the
last rows say what an event loop costs here that wakes up as often and does nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from llmserve.measure.bench import Target, bench
from llmserve.measure.job import Place
from llmserve.measure.loader import LIBRARY
from llmserve.measure.plan import Prompts
from llmserve.measure.runs import Load, Run
from llmserve.measure.summary import summarize
from tests.unit.scripted_triton import scripted

RATE = 100
AT_ONCE = 64
ROUNDS = 3
SECONDS = 2


@dataclass(frozen=True)
class Case:
    """Answers of so many pieces, through our own wire or through gRPC's library."""

    label: str
    pieces: int
    load: Load
    library: bool = False

    def run(self) -> Run:
        """Measure against a server of its own, which takes 50 ms for each piece."""
        tokens = (1,) * self.pieces
        with scripted(first=0.1, gap=0.05, tokens=tokens) as server, _library(self.library):
            target = Target("pieces" if self.load.stream else "whole", Place(server.url))
            return bench(target, self.load, Prompts())


def _rate(rate: int = RATE, *, stream: bool) -> Load:
    return Load.open(rate, requests=4 * rate, arrivals="constant", stream=stream)


def _at_once(requests: int, *, stream: bool) -> Load:
    return Load.closed(AT_ONCE, requests=requests, stream=stream)


CASES = (
    Case(f"{RATE} a second, in one piece", 1, _rate(stream=False)),
    Case(f"{10 * RATE} a second, in one piece", 1, _rate(10 * RATE, stream=False)),
    Case(f"{RATE} a second, 16 pieces", 16, _rate(stream=True)),
    Case(f"{RATE} a second, 16 pieces, gRPC's library", 16, _rate(stream=True), library=True),
    Case(f"{AT_ONCE} at a time, in one piece", 1, _at_once(1920, stream=False)),
    Case(f"{AT_ONCE} at a time, 16 pieces", 16, _at_once(256, stream=True)),
    Case(f"{AT_ONCE} at a time, 64 pieces", 64, _at_once(128, stream=True)),
)


WAKES = (10, 2 * RATE, 16 * RATE)
"""A second: one piece to send and one to take for each request, or 16."""


def idle(wakes: int) -> float:
    """Give the share of a core that it takes to wake up so many times a second."""

    async def sleep() -> None:
        began = time.monotonic()
        for at in range(SECONDS * wakes):
            await asyncio.sleep(max(0.0, began + at / wakes - time.monotonic()))

    before = time.process_time()
    asyncio.run(sleep())
    return (time.process_time() - before) / SECONDS


@contextmanager
def _library(wanted: bool) -> Iterator[None]:
    before = os.environ.pop(LIBRARY, None)
    if wanted:
        os.environ[LIBRARY] = "1"
    try:
        yield
    finally:
        os.environ.pop(LIBRARY, None)
        if before is not None:
            os.environ[LIBRARY] = before


def table() -> Table:
    """Measure all cases in turns."""
    runs: list[list[Run]] = [[] for _ in CASES]
    idles: list[list[float]] = [[] for _ in WAKES]
    for _ in range(ROUNDS):
        for wakes, seen in zip(WAKES, idles, strict=True):
            seen.append(idle(wakes))
        for case, made in zip(CASES, runs, strict=True):
            made.append(case.run())
    found = Table(
        "load", "requests/s", "pieces/s", "under way", "of a core", "per 100/s", "µs per request",
        "µs per piece", "late, P99", title="What the load generator costs",
    )  # fmt: skip
    for case, made in zip(CASES, runs, strict=True):
        rate = median(summarize(run).requests_per_second for run in made)
        seconds = median(run.loader.cpu / len(run.records) for run in made)
        found.add_row(
            case.label,
            f"{rate:.0f}",
            f"{rate * case.pieces:.0f}",
            f"{median(summarize(run).inflight for run in made):.1f}",
            f"{median(run.loader.busy for run in made):.1%}",
            f"{seconds * 100:.1%}",
            f"{seconds * 1e6:.0f}",
            f"{seconds / case.pieces * 1e6:.0f}",
            f"{median(run.loader.late for run in made) * 1000:.1f} ms",
        )
    for wakes, seen in zip(WAKES, idles, strict=True):
        found.add_row(f"nothing, {wakes} wake-ups a second", *[""] * 3, f"{median(seen):.1%}")
    return found
