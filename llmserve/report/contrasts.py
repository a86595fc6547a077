"""The plots of a comparison: all subjects in each of them, always in the same colours."""

from __future__ import annotations

from collections.abc import Callable

from llmserve.measure.runs import Record
from llmserve.measure.summary import first_token, latency, summarize
from llmserve.report import words
from llmserve.report.cells import Cells
from llmserve.report.doubts import few
from llmserve.report.metrics import metric, pooled, rounds, throughput
from llmserve.report.page import Figure
from llmserve.report.plots.bars import Bar, bars
from llmserve.report.plots.curves import Curve, curves
from llmserve.report.plots.pareto import Point, pareto
from llmserve.report.plots.percentiles import Times, percentiles


def throughput_figures(cells: Cells) -> list[Figure | None]:
    """Draw throughput under the load, or against the loads and against latency."""
    wanted = metric(throughput(cells.all))
    if len(cells.labels()) < 2:
        rows = [
            Bar(name, mean, at)
            for at, name in enumerate(cells.names)
            if (mean := rounds(cells.of(name, cells.main), wanted.name))
        ]
        return [bars("throughput", "Throughput", wanted, rows)]
    lines = _curves(cells, wanted.name)
    return [
        curves("throughput", "Throughput against the load", wanted, _axis(cells), lines),
        pareto(_points(cells, wanted.name), wanted, labels=_axis(cells)),
    ]


def latency_figures(cells: Cells) -> list[Figure | None]:
    """Draw latency and time to first token, against the loads and under the heaviest."""
    figures = []
    for name, what in (("latency", "latency"), ("ttft", "time to first token")):
        for point in ("p50", "p99"):
            title = f"{point.upper()} {what} against the load"
            lines = _curves(cells, f"{name}_{point}")
            figures.append(
                curves(f"{name}-{point}", title, metric(f"{name}_{point}"), _axis(cells), lines)
            )
    several = len(cells.labels()) > 1
    notes = [
        f"Under {words.clean(cells.main)}." if several else "",
        "All rounds together." if cells.comparison.rounds > 1 else "",
        few(cells.of(cells.names[0], cells.main)),
    ]
    note = " ".join(part for part in notes if part)
    streamed = any(summarize(run).ttft for run in cells.all)
    whole, first = _times(cells, latency), _times(cells, first_token)
    figures.append(percentiles("latency", "how long answers took", whole, note))
    figures.append(
        percentiles("ttft", "how long the first token took", first, note) if streamed else None
    )
    return figures


def _times(cells: Cells, take: Callable[[Record], float]) -> list[Times]:
    return [
        Times(
            name,
            tuple(
                take(record)
                for run in cells.of(name, cells.main)
                for record in run.records
                if record.error is None
            ),
            at,
        )
        for at, name in enumerate(cells.names)
    ]


def _curves(cells: Cells, name: str) -> list[Curve]:
    return [
        Curve(
            subject,
            tuple(
                (cells.height(label), mean)
                for label in cells.labels()
                if (mean := rounds(cells.of(subject, label), name))
            ),
            at,
        )
        for at, subject in enumerate(cells.names)
    ]


def _points(cells: Cells, name: str) -> list[Point]:
    found = []
    for subject in cells.names:
        for label in cells.labels():
            summary = pooled(cells.of(subject, label))
            mean = rounds(cells.of(subject, label), name)
            if summary and summary.latency and mean:
                load = words.tick(cells.height(label))
                found.append(Point(subject, load, summary.latency.p99, mean.value))
    return found


def _axis(cells: Cells) -> str:
    closed = all(load.concurrency is not None for load in cells.loads())
    return "requests under way at a time" if closed else "requests sent per second"
