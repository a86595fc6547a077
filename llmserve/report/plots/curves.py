"""A figure against the load, a line for each subject, with the rounds as a band."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmserve.report.canvas import draw, fitted, from_zero, plane, ticks
from llmserve.report.metrics import Mean, Metric
from llmserve.report.page import Figure, Table
from llmserve.report.palette import series
from llmserve.report.words import NONE, clean, tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True)
class Curve:
    """Points of a subject: the load as a number, and a figure over the rounds."""

    name: str
    points: tuple[tuple[float, Mean], ...]
    colour: int = 0


def curves(
    name: str, title: str, metric: Metric, across: str, lines: Sequence[Curve], note: str = ""
) -> Figure | None:
    """Draw a figure against the load; with a single load, there is no curve to draw."""
    lines = [line for line in lines if line.points]
    loads = sorted({load for line in lines for load, _ in line.points})
    if len(loads) < 2:
        return None
    table = _table(title, metric, across, lines, loads)
    alt = f"{title} against {across}. " + " ".join(
        f"{clean(line.name)}: "
        + ", ".join(f"{metric.show(mean.value)} at {tick(load)}" for load, mean in line.points)
        + "."
        for line in lines
    )
    banded = any(mean.low != mean.high for line in lines for _, mean in line.points)
    caption = " ".join(
        part
        for part in (
            "The band reaches from the lowest round to the highest." if banded else "",
            note,
        )
        if part
    )
    names = [line.name for line in lines] if len(lines) > 1 else []
    svg = draw(name, title, alt, _painter(metric, across, lines, loads), height=fitted(names))
    return Figure(name, title, caption, alt, svg, table)


def _painter(
    metric: Metric, across: str, lines: Sequence[Curve], loads: Sequence[float]
) -> Callable[[Drawing], None]:
    def paint(drawing: Drawing) -> None:
        from matplotlib.lines import Line2D

        legend = [
            (Line2D([], [], color=series(line.colour)[0], marker=series(line.colour)[1]), line.name)
            for line in lines
        ]
        left = 52.0 if metric.time else 44.0
        axes = plane(
            drawing, metric.label, across, legend=legend if len(lines) > 1 else (), left=left
        )
        for line in lines:
            colour, marker = series(line.colour)
            x = [load for load, _ in line.points]
            means = [mean for _, mean in line.points]
            axes.fill_between(
                x, [mean.low for mean in means], [mean.high for mean in means],
                color=colour, alpha=0.18, linewidth=0,
            )  # fmt: skip
            axes.plot(x, [mean.value for mean in means], color=colour, marker=marker)
        from_zero(axes, max(mean.high for line in lines for _, mean in line.points))
        load_axis(axes, loads)
        axes.locator_params(axis="y", nbins=6)
        ticks(axes, y="seconds" if metric.time else "number")

    return paint


def load_axis(axes: Axes, loads: Sequence[float]) -> None:
    """Mark the loads that were measured; those that double are set evenly."""
    if loads[0] > 0 and loads[-1] / loads[0] >= 8:
        axes.set_xscale("log", base=2)
        # Ends need room for markers, on this scale too.
        axes.set_xlim(loads[0] / 1.15, loads[-1] * 1.15)
    axes.set_xticks(loads, [tick(load) for load in loads])
    axes.set_xticks([], minor=True)


def _table(
    title: str, metric: Metric, across: str, lines: Sequence[Curve], loads: Sequence[float]
) -> Table:
    rows = []
    for load in loads:
        cells = [
            next((mean.show(metric.show) for at, mean in line.points if at == load), NONE)
            for line in lines
        ]
        rows.append((tick(load), *cells))
    columns = (across, *(clean(line.name) for line in lines))
    return Table(title, columns, tuple(rows))
