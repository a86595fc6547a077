"""Throughput against latency: what cannot be had better in one without losing in the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmserve.report.canvas import draw, fitted, from_zero, plane, ticks
from llmserve.report.metrics import Metric
from llmserve.report.page import Figure, Table
from llmserve.report.palette import LIGHT, series
from llmserve.report.words import clean, seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


_CROWD = 24
_NEAR = 0.03
"""Dots that are closer than that part of the plot cover one another."""


@dataclass(frozen=True)
class Point:
    """A subject under a load, or a variant: ``group`` gives it its colour, ``label`` is short."""

    group: str
    label: str
    latency: float
    throughput: float


def front(points: Sequence[Point]) -> list[Point]:
    """Give the points that no other beats in both, by latency.

    >>> best = Point("a", "1", 0.1, 10.0), Point("a", "2", 0.3, 30.0)
    >>> front([Point("b", "2", 0.4, 20.0), *best]) == list(best)
    True
    """
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.latency, -point.throughput)):
        if not found or point.throughput > found[-1].throughput:
            found.append(point)
    return found


def pareto(
    points: Sequence[Point], metric: Metric, *, limit: float | None = None, labels: str = "load",
    joined: bool = True,
) -> Figure | None:  # fmt: skip
    """Draw throughput against latency; the front is a line, and what lies beyond a limit pale."""
    if len(points) < 2:
        return None
    best = front(points)
    title = "Throughput against latency"
    table = Table(
        title,
        ("", labels, "P99 latency", metric.label, "on the front"),
        tuple(
            (clean(point.group), clean(point.label), seconds(point.latency),
             metric.show(point.throughput), "yes" if point in best else "no")
            for point in points
        ),
        frozenset({0, 1, 4}),
    )  # fmt: skip
    alt = (
        f"{title}. On the front, from the lowest latency to the highest throughput: "
        + "; ".join(
            f"{clean(point.group)} ({clean(point.label)}) with {metric.show(point.throughput)} "
            f"{metric.label} at {seconds(point.latency)}"
            for point in best
        )
        + "."
    )
    caption = (
        "Up and to the left is better. What lies on the grey line is beaten by nothing "
        f"in both at once; the numbers at dots are the {labels}."
    )
    if limit is not None:
        caption += f" The dotted line is the limit, {seconds(limit)}."
    groups = list(dict.fromkeys(point.group for point in points))
    names = groups if len(groups) > 1 else []
    svg = draw(
        "pareto",
        title,
        alt,
        _painter(points, best, metric, limit, joined=joined),
        height=fitted(names, 280),
    )
    return Figure("pareto", title, caption, alt, svg, table)


def _painter(
    points: Sequence[Point], best: Sequence[Point], metric: Metric, limit: float | None,
    *, joined: bool,
) -> Callable[[Drawing], None]:  # fmt: skip
    groups = list(dict.fromkeys(point.group for point in points))

    def paint(drawing: Drawing) -> None:
        from matplotlib.lines import Line2D

        legend = [
            (Line2D([], [], color=series(at)[0], marker=series(at)[1], linestyle=""), group)
            for at, group in enumerate(groups)
        ]
        axes = plane(drawing, metric.label, "P99 latency", legend=legend if len(groups) > 1 else ())
        axes.plot(
            [point.latency for point in best], [point.throughput for point in best],
            color=LIGHT["faint"], linewidth=7, solid_joinstyle="round", solid_capstyle="round",
        )  # fmt: skip
        for at, group in enumerate(groups):
            colour, marker = series(at)
            own = [point for point in points if point.group == group]
            axes.plot(
                [point.latency for point in own], [point.throughput for point in own],
                color=colour, marker=marker, linestyle="-" if joined else "", linewidth=1.2,
            )  # fmt: skip
        for label, point in _labels(points, best):
            axes.annotate(
                label, (point.latency, point.throughput), (5, 4),
                textcoords="offset points", fontsize=11, color=LIGHT["soft"],
            )  # fmt: skip
        if limit is not None:
            axes.axvline(limit, color=LIGHT["bad"], linestyle=":", linewidth=1.4)
        from_zero(axes, max(point.throughput for point in points) * 1.04)
        axes.set_xlim(0, max([limit or 0.0, *(point.latency for point in points)]) * 1.08 or 1.0)
        axes.locator_params(nbins=5)
        ticks(axes, x="seconds", y="number")

    return paint


def _labels(points: Sequence[Point], best: Sequence[Point]) -> list[tuple[str, Point]]:
    """Write labels of points that lie on one another in one; of very many, only those of the
    front and the first."""
    if len(points) > _CROWD:
        points = [point for point in points if point in best or point in points[:3]]
    wide = max(point.latency for point in points) or 1.0
    high = max(point.throughput for point in points) or 1.0
    found: list[tuple[list[str], Point]] = []
    for point in points:
        near = (
            names
            for names, other in found
            if abs(point.latency - other.latency) < _NEAR * wide
            and abs(point.throughput - other.throughput) < _NEAR * high
        )
        names = next(near, None)
        if names is None:
            found.append(([clean(point.label)], point))
        elif clean(point.label) not in names:
            names.append(clean(point.label))
    return [
        (", ".join(names[:3]) + (" …" if len(names) > 3 else ""), point) for names, point in found
    ]
