"""How large the batches were that the server ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmserve.report.canvas import draw, fitted, from_zero, plane
from llmserve.report.page import Figure, Table
from llmserve.report.palette import series
from llmserve.report.words import clean, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


_APART = 1.6


@dataclass(frozen=True)
class Sizes:
    """How often each batch size ran, and in whose model."""

    name: str
    counts: Mapping[str, int]
    colour: int = 0

    def shares(self) -> list[tuple[int, float]]:
        """Give the share of executions of each size, by size."""
        found = {int(size): many for size, many in self.counts.items() if size.isdigit()}
        whole = sum(found.values())
        return [(size, found[size] / whole) for size in sorted(found)] if whole else []


def batches(lines: Sequence[Sizes], name: str = "batches") -> Figure | None:
    """Draw the share of executions against their batch size; one size needs no plot."""
    lines = [line for line in lines if line.shares()]
    sizes = sorted({size for line in lines for size, _ in line.shares()})
    if len(sizes) < 2:
        return None
    title = "How large the batches were"
    known = [(clean(line.name), dict(line.shares())) for line in lines]
    table = Table(
        title,
        ("rows in an execution", *(who for who, _ in known)),
        tuple((str(size), *(share(part.get(size, 0.0)) for _, part in known)) for size in sizes),
    )
    alt = f"{title}. " + " ".join(
        f"{who}: most often {max(part, key=lambda size: part[size])} rows." for who, part in known
    )
    names = [line.name for line in lines] if len(lines) > 1 else []
    svg = draw(name, title, alt, _painter(lines), height=fitted(names))
    return Figure(name, title, "By Triton's own statistics.", alt, svg, table)


def _painter(lines: Sequence[Sizes]) -> Callable[[Drawing], None]:
    def paint(drawing: Drawing) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.ticker import MaxNLocator

        most = max(size for line in lines for size, _ in line.shares())
        legend = [
            (
                Line2D(
                    [],
                    [],
                    color=series(line.colour)[0],
                    marker=series(line.colour)[1],
                    markersize=4.5,
                ),
                line.name,
            )
            for line in lines
        ]
        axes = plane(
            drawing,
            "% of executions",
            "rows in an execution",
            legend=legend if len(lines) > 1 else (),
        )
        for at, line in enumerate(lines):
            colour, marker = series(line.colour)
            # Side by side, since the same sizes run in several.
            aside = _APART * (at - (len(lines) - 1) / 2) * most / 100
            x = [size + aside for size, _ in line.shares()]
            y = [100 * part for _, part in line.shares()]
            axes.vlines(x, 0, y, color=colour, linewidth=1.6)
            axes.plot(x, y, color=colour, marker=marker, linestyle="", markersize=4.5)
        from_zero(axes, 100 * max(part for line in lines for _, part in line.shares()))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))

    return paint
