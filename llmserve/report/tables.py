"""Tables that all reports share: the figures of runs, of the server, and of other tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llmserve.measure.runs import Run
from llmserve.measure.summary import summarize
from llmserve.measure.table import Row, shown
from llmserve.measure.table import rows as rows_of
from llmserve.report.metrics import Mean, metric
from llmserve.report.page import Table
from llmserve.report.words import NONE, clean, number, seconds, share

_SERVER = {"server_queue": "queue", "server_compute_infer": "compute_infer"}
_MANY = 6
"""Longer tables are folded away."""


def figures(named: Sequence[tuple[str, Run]]) -> Table:
    """Set the figures of subjects side by side; runs of the same name are rounds of it."""
    rounds: dict[str, list[list[Row]]] = {}
    for name, run in named:
        rounds.setdefault(name, []).append(rows_of(run))
    told = shown([table for tables in rounds.values() for table in tables])
    labels = list(dict.fromkeys(row.label for table in told for row in table))
    lines = []
    for label in labels:
        means = [_mean(tables, label) for tables in rounds.values()]
        every = [part for mean in means if mean for part in (mean.value, mean.low, mean.high)]
        # Counts stay counts, but not beside what is none.
        write = _count if all(part.is_integer() for part in every) else number
        cells = [mean.show(write) if mean else NONE for mean in means]
        lines.append((clean(label), *cells))
    several = any(len(tables) > 1 for tables in rounds.values())
    title = "Figures, mean of the rounds (lowest to highest)" if several else "Figures"
    return Table(title, ("", *(clean(name) for name in rounds)), tuple(lines))


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _mean(tables: Sequence[Sequence[Row]], label: str) -> Mean | None:
    found = [row.value for table in tables for row in table if row.label == label]
    return Mean.of([value for value in found if value is not None])


def failures(named: Sequence[tuple[str, Run]]) -> Table:
    """List what failed, by kind, with an example of each."""
    counts: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for name, run in named:
        for record in run.records:
            if record.error is not None:
                key = (clean(name), clean(record.error))
                counts[key] += 1
                examples.setdefault(key, clean(record.message or NONE))
    rows = tuple(
        (name, kind, f"{many:,}", examples[name, kind]) for (name, kind), many in counts.items()
    )
    return Table(
        "Failed requests", ("", "kind", "requests", "for example"), rows, frozenset({0, 1, 3})
    )


def server(named: Sequence[tuple[str, Run]]) -> Table:
    """Say what the server did, by its own statistics."""
    rows = []
    for name, run in named:
        # By our own count: an iterative model counts a request at each of its steps.
        many = max(1, len(run.records) + run.unfinished)
        for at, model in enumerate(run.server.models if run.server else ()):
            # The parts of an ensemble come after it.
            who = clean(name) if not at else f"{clean(name)}: {clean(model.model)}"
            mean = number(model.inferences / model.executions) if model.executions else NONE
            spent = (model.queue, model.compute_input, model.compute_infer, model.compute_output)
            rows.append(
                (who, f"{model.executions:,}", mean, *(seconds(part / many) for part in spent),
                 batch_sizes(model.batches))
            )  # fmt: skip
    columns = (
        "", "executions", "rows per execution", "queue", "input", "compute", "output",
        "batch sizes, how often",
    )  # fmt: skip
    title = "Triton's own statistics; times are means per request"
    return Table(title, columns, tuple(rows), frozenset({0, 7}), folded=len(rows) > _MANY)


def batch_sizes(batches: object) -> str:
    """Write how often each batch size ran.

    >>> batch_sizes({"8": 3, "1": 2})
    '1: 2, 8: 3'
    """
    if not isinstance(batches, dict) or not batches:
        return NONE
    order = sorted(batches, key=lambda size: (len(str(size)), str(size)))
    return ", ".join(f"{clean(size)}: {batches[size]:,}" for size in order)


def published(named: Sequence[tuple[str, Run]]) -> Table:
    """Show what models count on ``/metrics``; what rises and falls is among the figures."""
    names = list(
        dict.fromkeys(name for _, run in named if run.server for name in run.server.metrics)
    )
    rows = tuple(
        (
            clean(name),
            *(number(run.server.metrics.get(name)) if run.server else NONE for _, run in named),
        )
        for name in names
    )
    columns = ("", *(clean(name) for name, _ in named))
    folded = len(rows) > _MANY or len(named) > _MANY
    return Table("What models count on /metrics", columns, rows, folded=folded)


def tools(run: Run) -> Table:
    """Set the figures of other tools beside our own."""
    names = list(dict.fromkeys(name for tool in run.tools for name in tool.figures))
    summary = summarize(run)
    rows = []
    for name in names:
        wanted = metric(name)
        ours = wanted.of(summary) if name not in _SERVER else _in_server(run, _SERVER[name])
        cells = [wanted.show(ours)]
        for tool in run.tools:
            theirs = tool.figures.get(name)
            more = f" ({theirs / ours - 1:+.1%})" if ours and theirs is not None else ""
            cells.append(f"{wanted.show(theirs)}{more}")
        rows.append((wanted.label, *cells))
    columns = ("", "llmserve", *(f"{clean(tool.tool)} {clean(tool.version)}" for tool in run.tools))
    return Table("The same load by other tools", columns, tuple(rows))


def _in_server(run: Run, part: str) -> float | None:
    if not run.server or not run.server.models or not run.records:
        return None
    return float(getattr(run.server.models[0], part)) / (len(run.records) + run.unfinished)


def commands(run: Run) -> Table:
    """Say what was run of other tools."""
    rows = tuple((clean(tool.tool), clean(tool.command)) for tool in run.tools)
    return Table("How they were called", ("", "command"), rows, frozenset({0, 1}))


def loader(named: Sequence[tuple[str, Run]]) -> Table:
    """Say what asking cost, so that one sees whether it was in the way."""
    rows = tuple(
        (clean(name), str(run.loader.processes), seconds(run.loader.cpu), share(run.loader.busy),
         seconds(run.loader.late))
        for name, run in named
    )  # fmt: skip
    columns = ("", "processes", "processor time", "of a core, the busiest", "sent late, P99")
    return Table("What the load generator used", columns, rows, folded=len(rows) > _MANY)
