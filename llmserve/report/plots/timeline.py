"""Who waited and who got tokens, request by request: what batching does, at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmserve.measure.runs import Record, Run
from llmserve.report.canvas import WIDTH, draw
from llmserve.report.page import Figure, Table
from llmserve.report.palette import LIGHT, series
from llmserve.report.plots.rows import failures, firsts, pieces, spans, waits
from llmserve.report.words import clean, counted, seconds, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

ROWS = 120
"""More rows than that are thinner than a line on a telephone."""

PANELS = 4
_WIDE = 1120
_SIDE, _KEY, _HEAD, _FOOT = 14.0, 24.0, 26.0, 40.0


@dataclass(frozen=True)
class Panel:
    """A run and what to call it."""

    name: str
    run: Run
    colour: int = 0


def timeline(panels: Sequence[Panel], name: str = "timeline") -> Figure | None:
    """Draw a row for each request of each run, all on one scale of time."""
    panels = [panel for panel in panels if panel.run.records][:PANELS]
    if not panels:
        return None
    title = "Each request, from waiting to its last piece"
    alt = " ".join(_words(panel) for panel in panels)
    # Settled by the fullest panel, so that rows compare.
    many = max(len(shown(panel.run)) for panel in panels)

    def picture(width: float, pitch: float, which: str) -> str:
        height = max(40.0, pitch * many)
        tall = _KEY + len(panels) * (_HEAD + height) + _FOOT
        return draw(
            which, title, alt, lambda drawing: _paint(drawing, panels, height, pitch),
            width=width, height=tall,
        )  # fmt: skip

    pitch = min(10.0, max(2.6, 300 / many))
    return Figure(
        name, title, _caption(panels), alt, picture(_WIDE, pitch, name), _table(panels),
        narrow=picture(WIDTH, pitch, f"{name}-narrow"),
    )  # fmt: skip


def shown(run: Run) -> list[Record]:
    """Give the requests that are drawn, from the top down."""
    return sorted(run.records, key=lambda record: (record.scheduled, record.index))[:ROWS]


def _paint(drawing: Drawing, panels: Sequence[Panel], height: float, pitch: float) -> None:
    width, tall = (72 * side for side in drawing.get_size_inches())
    end = max(record.done for panel in panels for record in shown(panel.run))
    top = tall - _KEY
    for at, panel in enumerate(panels):
        top -= _HEAD + height
        axes = drawing.add_axes((_SIDE / width, top / tall, 1 - 2 * _SIDE / width, height / tall))
        axes.set_xlim(0, end or 1.0)
        records = shown(panel.run)
        axes.set_ylim(max(len(records), height / pitch) - 0.5, -0.5)
        scale = (width - 2 * _SIDE) / (end or 1.0)
        _rows(axes, records, series(panel.colour)[0], scale, pitch)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        last = at == len(panels) - 1
        axes.tick_params(labelbottom=last, bottom=last)
        over = (top + height + 7) / tall
        drawing.text(
            _SIDE / width, over, shorten(panel.name, 24 if width == WIDTH else 90),
            color=series(panel.colour)[0], weight="bold",
        )  # fmt: skip
        drawing.text(1 - _SIDE / width, over, _brief(panel.run), ha="right", color=LIGHT["soft"])
        if last:
            axes.set_xlabel("seconds from the start")
    _key(drawing, panels)


def _rows(axes: Axes, records: Sequence[Record], colour: str, scale: float, pitch: float) -> None:
    thick = 0.8 * pitch
    for (x, y), shade, stroke in (
        (waits(records), LIGHT["faint"], min(1.2, 0.35 * pitch)),
        (spans(records), colour, min(1.2, 0.35 * pitch)),
        (pieces(records, scale), colour, thick),
        (firsts(records, scale), LIGHT["ink"], thick),
    ):
        axes.plot(x, y, color=shade, linewidth=stroke, clip_on=False)
    x, y = failures(records)
    axes.plot(
        x, y, color=LIGHT["bad"], linestyle="", marker="x", clip_on=False,
        markersize=min(6.0, max(3.5, thick)), markeredgewidth=1.4,
    )  # fmt: skip


def _key(drawing: Drawing, panels: Sequence[Panel]) -> None:
    from matplotlib.lines import Line2D

    width, tall = (72 * side for side in drawing.get_size_inches())
    records = [record for panel in panels for record in shown(panel.run)]
    upright: dict[str, Any] = {"linestyle": "", "marker": "|", "markersize": 9}
    marks = [(Line2D([], [], color=LIGHT["faint"], linewidth=1.2), "waiting")]
    streamed = any(len(record.pieces) > 1 for record in records)
    first = Line2D([], [], color=LIGHT["ink"], markeredgewidth=1.8, **upright)
    marks.append((first, "first piece" if streamed else "whole answer"))
    if streamed:
        line = Line2D([], [], color=series(panels[0].colour)[0], markeredgewidth=1.2, **upright)
        marks.append((line, "each next piece"))
    if any(record.error for record in records):
        line = Line2D([], [], color=LIGHT["bad"], linestyle="", marker="x", markersize=6)
        marks.append((line, "failed"))
    drawing.legend(
        [mark for mark, _ in marks], [label for _, label in marks], loc="upper left",
        bbox_to_anchor=((_SIDE - 6) / width, 1 - 2 / tall), ncols=len(marks), borderaxespad=0,
        borderpad=0, handlelength=1.2, handletextpad=0.3, columnspacing=1.0,
    )  # fmt: skip


def _brief(run: Run) -> str:
    return f"{counted(len(run.records), 'request')} in {seconds(run.seconds)}"


def _caption(panels: Sequence[Panel]) -> str:
    records = [record for panel in panels for record in shown(panel.run)]
    words = "A row is a request, in the order in which they were due."
    if any(len(record.pieces) > 1 for record in records):
        words += (
            " Each mark is a piece of its answer, wider if it brought more tokens; marks closer "
            "together than the picture can show run into one bar."
        )
    else:
        words += " Answers came whole: the mark is where they did."
    if any(len(panel.run.records) > ROWS for panel in panels):
        words += f" Only the first {ROWS} requests are drawn."
    return words


def _words(panel: Panel) -> str:
    row = _row(panel)
    return (
        f"{row[0]}: {row[1]} requests, which waited {row[2]} for their first piece on average and "
        f"took {row[3]} from there to the last; the last of them was done after {row[4]}."
    )


def _table(panels: Sequence[Panel]) -> Table:
    columns = ("", "requests drawn", "wait for the first piece", "first to last piece", "last done")
    return Table("Averages of the rows", columns, tuple(_row(panel) for panel in panels))


def _row(panel: Panel) -> tuple[str, ...]:
    records = shown(panel.run)
    good = [record for record in records if record.error is None and record.first is not None]
    waited = [(record.first or 0.0) - record.scheduled for record in good]
    took = [record.done - (record.first or 0.0) for record in good]
    return (
        clean(panel.name),
        str(len(records)),
        seconds(sum(waited) / len(waited) if waited else None),
        seconds(sum(took) / len(took) if took else None),
        seconds(max(record.done for record in records)),
    )
