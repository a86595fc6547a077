"""One figure of each of several, as bars: throughput under a single load, or of a ranking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmserve.report.canvas import draw, name_lines
from llmserve.report.metrics import Mean, Metric
from llmserve.report.page import Figure, Table
from llmserve.report.palette import LIGHT, series
from llmserve.report.words import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_ROW, _HEAD, _FOOT, _SIDE, _LINE = 42.0, 24.0, 10.0, 8.0, 15.0


@dataclass(frozen=True)
class Bar:
    """A figure over rounds, and whose it is; ``colour`` is that of its series."""

    name: str
    value: Mean
    colour: int = 0
    mark: str = ""


def bars(
    name: str, title: str, metric: Metric, rows: Sequence[Bar], note: str = ""
) -> Figure | None:
    """Draw a bar for each, with its figure in words and its rounds as a line."""
    if not rows:
        return None
    shown = [(clean(row.name), row.value.show(metric.show)) for row in rows]
    alt = f"{title}, {metric.label}. " + " ".join(f"{who}: {what}." for who, what in shown)
    spread = any(row.value.low != row.value.high for row in rows)
    caption = " ".join(
        part
        for part in (
            "The line reaches from the lowest round to the highest." if spread else "",
            note,
        )
        if part
    )
    height = _HEAD + _row(rows) * len(rows) + _FOOT
    svg = draw(name, title, alt, _painter(metric, rows), height=height)
    return Figure(name, title, caption, alt, svg, Table(title, ("", metric.label), tuple(shown)))


def _lines(rows: Sequence[Bar]) -> tuple[list[list[str]], int]:
    return name_lines([f"{row.mark} {row.name}".strip() for row in rows])


def _row(rows: Sequence[Bar]) -> float:
    return _ROW + _LINE * (_lines(rows)[1] - 1)


def _painter(metric: Metric, rows: Sequence[Bar]) -> Callable[[Drawing], None]:
    def paint(drawing: Drawing) -> None:
        width, tall = (72 * side for side in drawing.get_size_inches())
        drawing.text(_SIDE / width, 1 - 14 / tall, metric.label, color=LIGHT["soft"])
        axes = drawing.add_axes(
            (_SIDE / width, _FOOT / tall, 1 - 2 * _SIDE / width, 1 - (_HEAD + _FOOT) / tall)
        )
        axes.set_axis_off()
        axes.set_ylim(len(rows), 0)
        axes.set_xlim(0, max(row.value.high for row in rows) * 1.02 or 1.0)
        names, pitch = _lines(rows)[0], _row(rows)
        centre, thick = 1 - 14 / pitch, 14 / pitch
        for at, row in enumerate(rows):
            colour = series(row.colour)[0]
            axes.barh(at + centre, row.value.value, height=thick, color=colour)
            if row.value.low != row.value.high:
                axes.plot(
                    [row.value.low, row.value.high], [at + centre] * 2,
                    color=LIGHT["ink"], linewidth=1.4, marker="|", markersize=7,
                )  # fmt: skip
            # In units of the picture, since the axis is one of figures.
            over = _HEAD + pitch * at + 14
            for line, text in enumerate(names[at]):
                drawing.text(_SIDE / width, 1 - (over + _LINE * line) / tall, text)
            value = metric.show(row.value.value)
            drawing.text(1 - _SIDE / width, 1 - over / tall, value, ha="right", weight="bold")

    return paint
