"""Lines as a hand draws them: what drawings of shapes and digits are made of."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

Point = tuple[float, float]
Stroke = list[Point]


def arc(x: float, y: float, rx: float, ry: float, start: float, stop: float) -> Stroke:
    """Return a part of an ellipse between two angles in degrees, clockwise from the right."""
    count = max(4, round(abs(stop - start) / 12))
    angles = [math.radians(start + (stop - start) * i / count) for i in range(count + 1)]
    return [(x + rx * math.cos(angle), y + ry * math.sin(angle)) for angle in angles]


def path(*corners: Point) -> Stroke:
    """Return a way from corner to corner with points between them, which can wobble."""
    points = []
    for (ax, ay), (bx, by) in pairwise(corners):
        points += [(ax + (bx - ax) * i / 6, ay + (by - ay) * i / 6) for i in range(6)]
    return [*points, corners[-1]]


def closed(*corners: Point) -> Stroke:
    return path(*corners, corners[0])


def curve(*through: Point) -> Stroke:
    """Return a smooth way through points: a spline of Catmull and Rom."""
    if len(through) < 3:
        return path(*through)
    points: Stroke = []
    ends = [through[0], *through, through[-1]]
    for a, b, c, d in zip(ends, ends[1:], ends[2:], ends[3:], strict=False):
        for i in range(5):
            t = i / 5
            x, y = (
                b[axis]
                + t * (c[axis] - a[axis]) / 2
                + t * t * (2 * a[axis] - 5 * b[axis] + 4 * c[axis] - d[axis]) / 2
                + t**3 * (3 * b[axis] - a[axis] - 3 * c[axis] + d[axis]) / 2
                for axis in (0, 1)
            )
            points.append((x, y))
    return [*points, through[-1]]


def wobbly(random: Random, strokes: list[Stroke]) -> list[Stroke]:
    """Return strokes as a hand draws them, which is not as exact as a ruler."""
    most = random.choice((0.0, 0.02, 0.05))
    if not most:
        return strokes
    waves = [
        (random.uniform(0, most), random.uniform(1.5, 5.0), random.uniform(0, math.tau))
        for _ in range(4)
    ]

    def moved(at: float, axis: int) -> float:
        return sum(size * math.sin(often * at + phase) for size, often, phase in waves[axis::2])

    return [[(x + moved(y - x, 0), y + moved(x + y, 1)) for x, y in stroke] for stroke in strokes]


def centred(strokes: list[Stroke]) -> list[Stroke]:
    """Return strokes with the middle of what they cover at 0."""
    xs, ys = zip(*(point for stroke in strokes for point in stroke), strict=True)
    x, y = (min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2
    return [[(each - x, other - y) for each, other in stroke] for stroke in strokes]
