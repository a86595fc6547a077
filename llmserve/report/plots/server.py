"""Where the time of a request went, by what the server itself says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmserve.measure.runs import ModelFigures
from llmserve.report.canvas import draw, name_lines
from llmserve.report.page import Figure
from llmserve.report.palette import LIGHT, SERIES
from llmserve.report.words import clean, seconds, tick

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_ROW, _HEAD, _FOOT, _SIDE, _LINE = 42.0, 34.0, 32.0, 12.0, 15.0
_ELSEWHERE = "elsewhere"
_PARTS = (
    ("queue", "queue", LIGHT["faint"]),
    ("compute_input", "input", SERIES[2]),
    ("compute_infer", "compute", SERIES[0]),
    ("compute_output", "output", SERIES[1]),
    ("", _ELSEWHERE, LIGHT["line"]),
)


@dataclass(frozen=True)
class Share:
    """The figures of a model, what to call them, and how many requests were sent.

    By our own count: an iterative model counts a request at each of its steps.
    """

    name: str
    figures: ModelFigures
    sent: int
    ensemble: bool = False

    def parts(self) -> list[float]:
        """Give the seconds of a request in the queue, input, compute, output, and elsewhere.

        Of an ensemble Triton adds up only how long its steps computed: the rest went in their
        queues, or they have answered later than they let go of the request.
        """
        many = max(1, self.sent)
        told = [getattr(self.figures, part) / many for part, _, _ in _PARTS[:-1]]
        rest = self.figures.success / many - sum(told) if self.ensemble else 0.0
        return [*told, max(0.0, rest)]


def server_time(rows: Sequence[Share], name: str = "server-time") -> Figure | None:
    """Draw the mean time of a request in the server, parted."""
    rows = [row for row in rows if sum(row.parts()) > 0]
    if not rows:
        return None
    title = "Where the server spent the time of a request"
    alt = f"{title}, on average. " + " ".join(
        f"{clean(row.name)}: "
        + ", ".join(
            f"{seconds(part)} {label}"
            for part, (_, label, _) in zip(row.parts(), _PARTS, strict=True)
            if part or label != _ELSEWHERE
        )
        + "."
        for row in rows
    )
    caption = "Means of Triton's own statistics, in seconds of each request."
    if any(row.parts()[-1] for row in rows):
        caption += (
            " What went elsewhere of an ensemble's time went in its steps' queues, or in steps "
            "that answer after they have let go of the request."
        )
    pitch = _ROW + _LINE * (name_lines([row.name for row in rows])[1] - 1)
    height = _HEAD + pitch * len(rows) + _FOOT
    svg = draw(name, title, alt, _painter(rows, pitch), height=height)
    return Figure(name, title, caption, alt, svg)


def _painter(rows: Sequence[Share], pitch: float) -> Callable[[Drawing], None]:
    def paint(drawing: Drawing) -> None:
        from matplotlib.patches import Patch
        from matplotlib.ticker import FuncFormatter

        width, tall = (72 * side for side in drawing.get_size_inches())
        axes = drawing.add_axes(
            (_SIDE / width, _FOOT / tall, 1 - 2 * _SIDE / width, 1 - (_HEAD + _FOOT) / tall)
        )
        axes.set_ylim(len(rows), 0)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        names = name_lines([row.name for row in rows])[0]
        for at, row in enumerate(rows):
            start = 0.0
            for part, (_, _, colour) in zip(row.parts(), _PARTS, strict=True):
                axes.barh(at + 1 - 14 / pitch, part, left=start, height=15 / pitch, color=colour)
                start += part
            over = _HEAD + pitch * at + 14
            for line, text in enumerate(names[at]):
                drawing.text(_SIDE / width, 1 - (over + _LINE * line) / tall, text)
            drawing.text(
                1 - _SIDE / width, 1 - over / tall, seconds(start), ha="right", weight="bold"
            )
        axes.set_xlim(0, max(sum(row.parts()) for row in rows) * 1.02)
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: tick(float(value), time=True))
        )
        there = _PARTS if any(row.parts()[-1] for row in rows) else _PARTS[:-1]
        drawing.legend(
            [Patch(color=colour) for _, _, colour in there], [label for _, label, _ in there],
            loc="upper left", bbox_to_anchor=(_SIDE / width, 1 - 8 / tall), ncols=len(there),
            borderaxespad=0, borderpad=0, handlelength=1, handletextpad=0.4, columnspacing=1.4,
        )  # fmt: skip

    return paint
