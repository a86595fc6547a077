"""How times are spread: the share of requests that were done within a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmserve.measure.summary import percentile
from llmserve.report.canvas import draw, fitted, plane, ticks
from llmserve.report.page import Figure, Table
from llmserve.report.palette import series
from llmserve.report.words import clean, seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_SHARES = (0.5, 0.9, 0.99)
_STEPS = 200
"""More points than that no picture shows."""


@dataclass(frozen=True)
class Times:
    """Times in seconds, and whose they are."""

    name: str
    values: tuple[float, ...]
    colour: int = 0


def percentiles(name: str, what: str, lines: Sequence[Times], note: str = "") -> Figure | None:
    """Draw the share of requests against the time within which they were done."""
    lines = [line for line in lines if line.values]
    if not lines:
        return None
    title = what[:1].upper() + what[1:]
    table = Table(
        title,
        ("", "mean", "P50", "P90", "P99", "longest"),
        tuple((clean(line.name), *(seconds(value) for value in _points(line))) for line in lines),
    )
    alt = f"{title}. " + " ".join(
        f"{row[0]}: half within {row[2]}, 90 % within {row[3]}, 99 % within {row[4]}."
        for row in table.rows
    )
    names = [line.name for line in lines] if len(lines) > 1 else []
    svg = draw(name, title, alt, _painter(lines), height=fitted(names))
    caption = f"The dots are the 50th, 90th and 99th percentile.{' ' + note if note else ''}"
    return Figure(name, title, caption, alt, svg, table)


def _painter(lines: Sequence[Times]) -> Callable[[Drawing], None]:
    def paint(drawing: Drawing) -> None:
        from matplotlib.lines import Line2D

        legend = [
            (Line2D([], [], color=series(line.colour)[0], marker=series(line.colour)[1]), line.name)
            for line in lines
        ]
        axes = plane(
            drawing, "% of requests", "done within", legend=legend if len(lines) > 1 else ()
        )
        for line in lines:
            order = sorted(line.values)
            steps = min(_STEPS, max(2, len(order)))
            shares = [step / (steps - 1) for step in range(steps)]
            colour, marker = series(line.colour)
            axes.plot(
                [percentile(order, share) for share in shares],
                [100 * share for share in shares],
                color=colour,
            )
            axes.plot(
                [percentile(order, share) for share in _SHARES],
                [100 * share for share in _SHARES],
                color=colour, marker=marker, linestyle="",
            )  # fmt: skip
        axes.set_ylim(0, 102)
        axes.set_yticks([0, 25, 50, 75, 90, 100])
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=5)
        ticks(axes, x="seconds")

    return paint


def _points(line: Times) -> list[float]:
    order = sorted(line.values)
    mean = sum(order) / len(order)
    return [mean, *(percentile(order, share) for share in _SHARES), order[-1]]
