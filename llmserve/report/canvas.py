"""A plot of our style: sizes in units of the SVG, of which a telephone shows about 330.

matplotlib draws, for these reasons: it is as well kept as any library of its kind, its SVG needs
no script and also stands in Markdown, and a plot takes 5 to 100 kB, where those that draw in the
browser bring 1 to 4 MB of script to every page.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llmserve.report.palette import LIGHT
from llmserve.report.svg import polish
from llmserve.report.words import shorten, tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

WIDTH = 360
HEIGHT = 250
_LEFT, _RIGHT, _TOP, _BOTTOM, _LEGEND = 46, 14, 28, 42, 18

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # A name may hold a dollar.
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": True,
    "font.size": 12,
    "axes.labelsize": 12,
    "legend.fontsize": 12,
    "text.color": LIGHT["ink"],
    "axes.labelcolor": LIGHT["soft"],
    "axes.edgecolor": LIGHT["soft"],
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.7,
    "xtick.color": LIGHT["soft"],
    "ytick.color": LIGHT["soft"],
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "lines.solid_capstyle": "butt",
    "path.simplify": False,  # It would join the marks of a timeline.
    "legend.frameon": False,
    "savefig.facecolor": "none",
}


@contextmanager
def style(name: str) -> Iterator[None]:
    """Draw in our style, whatever the settings of who runs this are."""
    import matplotlib

    keep = {"backend", "backend_fallback", "interactive", "toolbar", "timezone"}
    plain = {key: value for key, value in matplotlib.rcParamsDefault.items() if key not in keep}
    with matplotlib.rc_context():
        # Ids are hashes: salted, the same plot has the same bytes.
        matplotlib.rcParams.update({**plain, **_STYLE, "svg.hashsalt": name})
        yield


def draw(
    name: str,
    title: str,
    alt: str,
    paint: Callable[[Drawing], None],
    *,
    width: float = WIDTH,
    height: float = HEIGHT,
) -> str:
    """Give the SVG of what ``paint`` draws."""
    with style(name):
        from matplotlib.figure import Figure as Drawing

        drawing = Drawing(figsize=(width / 72, height / 72), dpi=72)
        paint(drawing)
        buffer = io.BytesIO()
        drawing.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return polish(buffer.getvalue(), name, title, alt)


def plane(
    drawing: Drawing,
    up: str,
    across: str,
    *,
    legend: Sequence[tuple[Any, str]] = (),
    left: float = _LEFT,
    above: float = 0,
) -> Axes:
    """Give a pair of axes: what goes up is written above, where it can be read, what goes across
    below, and the legend between the two. ``above`` is more room there."""
    width, height = (72 * side for side in drawing.get_size_inches())
    rows = legend_rows([label for _, label in legend], width - 20)
    top = _TOP + above + _LEGEND * len(rows)
    axes = drawing.add_axes(
        (
            left / width,
            _BOTTOM / height,
            (width - left - _RIGHT) / width,
            (height - top - _BOTTOM) / height,
        )
    )
    drawing.text(6 / width, 1 - 14 / height, up, ha="left", color=LIGHT["soft"])
    axes.set_xlabel(across)
    for at, row in enumerate(rows):
        place = (2 / width, 1 - (_TOP - 6 + _LEGEND * (at + 1)) / height)
        drawing.legend(
            [legend[index][0] for index in row],
            # matplotlib leaves out names that begin with an underscore.
            [f" {shorten(legend[index][1], 44)}" for index in row],
            loc="lower left", bbox_to_anchor=place, ncols=len(row), borderaxespad=0,
            borderpad=0, handlelength=1.6, handletextpad=0.3, columnspacing=1.2,
        )  # fmt: skip
    return axes


def legend_rows(labels: Sequence[str], width: float) -> list[list[int]]:
    """Share names out to rows that they fit into."""
    rows: list[list[int]] = []
    room = 0.0
    for at, label in enumerate(labels):
        need = 36 + 7.2 * min(44, len(label))
        if not rows or need > room:
            rows.append([])
            room = width
        rows[-1].append(at)
        room -= need
    return rows


def fitted(labels: Sequence[str], height: float = HEIGHT) -> float:
    """Give the height that leaves the plot its own whatever the legend takes."""
    return height + _LEGEND * max(0, len(legend_rows(labels, WIDTH - 20)) - 1)


def name_lines(names: Sequence[str]) -> tuple[list[list[str]], int]:
    """Break names that are longer than a line beside their figure, and say how many lines the
    longest takes."""
    lines = [textwrap.wrap(shorten(name, 88), 34) or [""] for name in names]
    return lines, max(map(len, lines), default=1)


def ticks(axes: Axes, *, x: str | None = None, y: str | None = None) -> None:
    """Write ticks as ``seconds`` or as ``number``."""
    from matplotlib.ticker import FuncFormatter

    for axis, kind in ((axes.xaxis, x), (axes.yaxis, y)):
        if kind:
            timed = kind == "seconds"
            axis.set_major_formatter(
                FuncFormatter(lambda value, _, timed=timed: tick(float(value), time=timed))
            )


def from_zero(axes: Axes, most: float) -> None:
    """Let the upward axis begin at nothing: lengths then compare as they look."""
    axes.set_ylim(0, most * 1.08 or 1.0)
