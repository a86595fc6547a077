"""The tables of a comparison, over its rounds."""

from __future__ import annotations

from llmserve.report import words
from llmserve.report.cells import Cells
from llmserve.report.metrics import metric, rounds
from llmserve.report.page import Table
from llmserve.report.plots.ratios import drawable

_SHORT = (
    "requests_per_second",
    "output_tokens_per_second",
    "latency_p50",
    "latency_p99",
    "ttft_p50",
)


def every_load(cells: Cells) -> Table | None:
    """Give the figures under each load, folded away: the plots have them."""
    if len(cells.labels()) < 2:
        return None
    shown = [metric(name) for name in _SHORT if rounds(cells.all, name)]
    rows = []
    for label in cells.labels():
        for subject in cells.names:
            runs = cells.of(subject, label)
            if runs:
                means = [(each, rounds(runs, each.name)) for each in shown]
                found = [mean.show(each.show) if mean else words.NONE for each, mean in means]
                rows.append((words.clean(subject), words.clean(label), *found))
    columns = ("", "load", *(each.label for each in shown))
    title = "All loads, mean of the rounds (lowest to highest)"
    return Table(title, columns, tuple(rows), frozenset({0, 1}), folded=True)


def ratio_table(cells: Cells, subject: str) -> Table | None:
    """Give all ratios of a subject, folded away, unless the plot of a single load has them."""
    several = len(cells.labels()) > 1
    if not several and all(drawable(row) for row in cells.ratios(subject, cells.main)):
        return None
    rows = tuple(
        (metric(row.metric).label, words.clean(row.load), words.times(row.ratio),
         words.times(row.low), words.times(row.high), words.clean(row.verdict),
         words.clean(row.why))
        for name in dict.fromkeys(row.metric for row in cells.comparison.ratios)
        for label in cells.labels()
        for row in cells.ratios(subject, label)
        if row.metric == name
    )  # fmt: skip
    title = f"All ratios of {words.clean(subject)} to {words.clean(cells.names[0])}"
    columns = ("", "load", "ratio", "from", "to", "verdict", "why")
    return Table(title, columns, rows, frozenset({0, 1, 5, 6}), folded=several)
