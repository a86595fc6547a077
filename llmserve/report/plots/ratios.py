"""How many times as much: the ratios of a comparison with their intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from llmserve.measure.series import Ratio
from llmserve.report.canvas import draw
from llmserve.report.metrics import metric
from llmserve.report.page import Figure, Table
from llmserve.report.palette import LIGHT
from llmserve.report.words import clean, factor, shorten, times

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_ROW, _HEAD, _FOOT, _SIDE = 40.0, 22.0, 30.0, 12.0
_SHADES = {"better": "good", "worse": "bad"}


def ratios(
    rows: Sequence[Ratio], subject: str, against: str, load: str, name: str
) -> Figure | None:
    """Draw the ratios of one subject under one load; 1 is a line that an interval may cross."""
    rows = [row for row in rows if drawable(row)]
    if not rows:
        return None
    title = f"{clean(subject)} in multiples of {clean(against)}, {clean(load)}"
    alt = f"{title}. " + " ".join(
        f"{metric(row.metric).label}: {_range(row)}, {clean(row.verdict)}." for row in rows
    )
    table = Table(
        title,
        ("", "ratio", "from", "to", "verdict", "why"),
        tuple(
            (metric(row.metric).label, times(row.ratio), times(row.low), times(row.high),
             clean(row.verdict), clean(row.why))
            for row in rows
        ),
        frozenset({0, 4, 5}),
    )  # fmt: skip
    caption = (
        "The line of each is its 95 % interval. Where it crosses 1, the spread swallows the "
        "difference. Of times, less is better; of rates, more."
    )
    height = _HEAD + _ROW * len(rows) + _FOOT
    return Figure(
        name, title, caption, alt, draw(name, title, alt, _painter(rows), height=height), table
    )


def drawable(row: Ratio) -> bool:
    """Say whether there is an interval to draw: one round has none."""
    return row.ratio > 0 and row.low > 0 and isfinite(row.high)


def _range(row: Ratio) -> str:
    return f"{times(row.ratio)} ({factor(row.low)} to {factor(row.high)})"


def _painter(rows: Sequence[Ratio]) -> Callable[[Drawing], None]:
    def paint(drawing: Drawing) -> None:
        width, tall = (72 * side for side in drawing.get_size_inches())
        axes = drawing.add_axes(
            (_SIDE / width, _FOOT / tall, 1 - 2 * _SIDE / width, 1 - (_HEAD + _FOOT) / tall)
        )
        axes.set_xscale("log", base=2)
        axes.set_ylim(len(rows), 0)
        ends = [row.low for row in rows] + [row.high for row in rows] + [1.0]
        axes.set_xlim(min(0.7, min(ends) / 1.1), max(1.4, max(ends) * 1.1))
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.axvline(1, color=LIGHT["soft"], linewidth=1)
        for at, row in enumerate(rows):
            shade = LIGHT[_SHADES.get(row.verdict, "soft")]
            axes.plot([row.low, row.high], [at + 0.7] * 2, color=shade, linewidth=2.4)
            axes.plot([row.ratio], [at + 0.7], color=shade, marker="o", markersize=7)
            over = 1 - (_HEAD + _ROW * at + 14) / tall
            drawing.text(_SIDE / width, over, shorten(metric(row.metric).label, 34))
            drawing.text(
                1 - _SIDE / width, over, times(row.ratio), ha="right", weight="bold", color=shade
            )
        _scale(axes)

    return paint


def _scale(axes: object) -> None:
    from matplotlib.axes import Axes
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    assert isinstance(axes, Axes)  # noqa: S101
    low, high = axes.get_xlim()
    steps = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]
    if high / low < 4:
        steps = [0.25, 0.5, 0.7, 0.8, 1, 1.25, 1.5, 2, 3]
    axes.xaxis.set_major_locator(FixedLocator([step for step in steps if low <= step <= high]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} x"))
    axes.xaxis.set_minor_locator(NullLocator())
