"""What the load generator of ``llmserve bench`` costs: processor time of its process.

64 requests are under way at all times, and a server that works to a time table answers them, in
one piece or in many; a piece is a message of one token. Counted is all that the process does from
the first request to the last answer, in the system as well, and nothing of what starts it or reads
its notes. A share of a core is for 100 requests a second: in one piece they are 100 messages a
second, of 16 pieces 1,600.
"""

from __future__ import annotations

import os
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

AT_ONCE = 64
ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """Answers of so many pieces, through our own wire or through gRPC's library."""

    label: str
    pieces: int
    requests: int
    library: bool = False

    def run(self) -> Run:
        """Measure against a server of its own, which takes 50 ms for each piece."""
        tokens = (1,) * self.pieces
        with scripted(first=0.1, gap=0.05, tokens=tokens) as server, _library(self.library):
            stream = self.pieces > 1
            target = Target("pieces" if stream else "whole", Place(server.url))
            load = Load.closed(AT_ONCE, requests=self.requests, stream=stream)
            return bench(target, load, Prompts())


CASES = (
    Case("in one piece", 1, 1920),
    Case("streams of 16 pieces", 16, 256),
    Case("streams of 64 pieces", 64, 128),
    Case("streams of 16 pieces, gRPC's library", 16, 256, library=True),
)


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
    runs: dict[Case, list[Run]] = {case: [] for case in CASES}
    for _ in range(ROUNDS):
        for case in CASES:
            runs[case].append(case.run())
    found = Table(
        "answers", "requests/s", "pieces/s", "under way", "µs per request", "µs per piece",
        "of a core at 100 requests/s", "late, P99",
        title=f"What the load generator costs, {AT_ONCE} requests at a time",
    )  # fmt: skip
    for case, made in runs.items():
        rate = median(summarize(run).requests_per_second for run in made)
        request = median(run.loader.cpu / len(run.records) for run in made)
        found.add_row(
            case.label,
            f"{rate:.0f}",
            f"{rate * case.pieces:.0f}",
            f"{median(summarize(run).inflight for run in made):.1f}",
            f"{request * 1e6:.0f}",
            f"{request / case.pieces * 1e6:.0f}",
            f"{request * 100:.1%}",
            f"{median(run.loader.late for run in made) * 1000:.1f} ms",
        )
    return found
