"""Digits of a hand that the training never saw, to measure whether it learned more than its own.

They are put together from arcs and lines, and not from the points of ``digits``; this hand
trembles, and its strokes do not meet exactly.
"""

from __future__ import annotations

from random import Random

from plugins.tools.demo_trainer.vision.digits import WIDEST_ZERO
from plugins.tools.demo_trainer.vision.strokes import Stroke, arc, centred, path


def written(random: Random, digit: str, aspect: float) -> list[Stroke]:
    """Return a digit's strokes, as those of ``digits.written``."""
    wide = random.uniform(0.36, 0.58)
    slant, size = random.uniform(-0.1, 0.3), random.choice((0.0, 0.02, 0.035))
    shown = []
    for stroke in _strokes(random, digit, wide, aspect):
        x, y = random.gauss(0, 0.03), random.gauss(0, 0.03)
        trembling = []
        for each, other in stroke:
            x, y = x + random.gauss(0, size), y + random.gauss(0, size)
            trembling.append((each + x - slant * (other + y), other + y))
            x, y = x * 0.8, y * 0.8
        shown.append(trembling)
    return centred(shown)


def _strokes(random: Random, digit: str, wide: float, aspect: float) -> list[Stroke]:
    low = random.uniform(-0.1, 0.2)
    if digit == "0":
        width = min(wide * 1.2, WIDEST_ZERO * aspect * 0.92)
        begin = random.uniform(-110, -20)
        return [arc(0, 0, width, 1, begin, begin - random.uniform(350, 385))]
    if digit == "1":
        stem = path((0, -1), (0, 1))
        flag = path((-wide * random.uniform(0.6, 1.1), -0.65 + low), (0, -1))
        foot = [path((-wide * 0.8, 1), (wide * 0.8, 1))] if random.random() < 0.3 else []
        return [flag + stem, *foot]
    if digit == "2":
        bow = arc(0, -0.45, wide, 0.55, random.uniform(170, 215), 380)
        return [bow + path(bow[-1], (-wide, 1)) + path((-wide, 1), (wide * 1.1, 1))]
    if digit == "3":
        middle = -0.05 + low
        half = (middle + 1) / 2, (1 - middle) / 2
        bow = arc(0, -1 + half[0], wide * 0.9, half[0], random.uniform(-165, -120), 85)
        return [bow + arc(0, 1 - half[1], wide, half[1], -85, random.uniform(110, 160))]
    if digit == "4":
        cross = 0.2 + low
        if random.random() < 0.35:
            return [path((wide * 0.5, 1), (wide * 0.5, -1), (-wide, cross), (wide * 1.1, cross))]
        start = random.uniform(-wide, 0)
        stem = path((wide * 0.6, random.uniform(-1, -0.2)), (wide * 0.5, 1))
        return [path((start, -1), (-wide, cross), (wide * 1.1, cross)), stem]
    if digit == "5":
        bowl = arc(-0.05, 0.38, wide * 1.05, 0.62, random.uniform(-140, -115), 145)
        left = path((-wide * 0.75, -1), bowl[0])
        hat = path((wide, -1), (-wide * 0.75, -1))
        return [hat + left + bowl] if random.random() < 0.5 else [left + bowl, hat]
    if digit == "6":
        down = arc(wide, 0.45, wide * 2, 1.45, random.uniform(-100, -75), -180)
        return [down + arc(0, 0.45, wide, 0.52, 180, -random.uniform(150, 190))]
    if digit == "7":
        end = random.uniform(-0.5, 0.2), 1.0
        stroke = path((-wide, -1), (wide, -1 + random.uniform(-0.1, 0.05)), end)
        bar = path((-wide * 0.6, 0.1), (wide * 0.8, low))
        return [stroke, bar] if random.random() < 0.4 else [stroke]
    if digit == "8":
        middle, narrow = -0.05 + low / 2, wide * random.uniform(0.7, 0.95)
        upper, lower = (middle + 1) / 2, (1 - middle) / 2
        return [
            arc(0, -1 + upper, narrow, upper, 90, 455),
            arc(0, 1 - lower, wide, lower, -90, random.uniform(260, 275)),
        ]
    loop = arc(0, -0.5, wide, 0.5 + low / 2, -10, -random.uniform(345, 380))
    if random.random() < 0.5:
        return [loop + path((wide, -0.5), (wide * random.uniform(0.2, 1), 1))]
    return [loop + arc(-wide * 0.4, -0.3, wide * 1.4, 1.3, -10, random.uniform(85, 120))]
