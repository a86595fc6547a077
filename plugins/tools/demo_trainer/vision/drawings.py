"""Drawings for the demo model that sees: shapes in colours, as a hand may draw them."""

from __future__ import annotations

import colorsys
import math
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from PIL import Image, ImageDraw

Point = tuple[float, float]
Stroke = list[Point]

KINDS = ("circle", "square", "triangle", "star", "line")

_HUES = {
    # Degrees, then saturation and brightness.
    "red": ((-8, 7), (0.75, 1.0), (0.7, 1.0)),
    "orange": ((22, 39), (0.8, 1.0), (0.85, 1.0)),
    "yellow": ((49, 62), (0.65, 1.0), (0.85, 1.0)),
    "green": ((85, 150), (0.5, 1.0), (0.35, 0.95)),
    "blue": ((196, 245), (0.5, 1.0), (0.5, 1.0)),
    "purple": ((268, 302), (0.5, 1.0), (0.4, 0.85)),
    "pink": ((322, 350), (0.25, 0.62), (0.9, 1.0)),
    "brown": ((14, 32), (0.55, 0.9), (0.3, 0.58)),
    "black": ((0, 360), (0.0, 0.1), (0.0, 0.1)),
    "grey": ((0, 360), (0.0, 0.05), (0.42, 0.8)),
    "white": ((0, 360), (0.0, 0.03), (0.95, 1.0)),
}
COLOURS = tuple(_HUES)
# Tones of two that nobody would draw on each other, since they can hardly be told apart.
_ALIKE = (
    {"red", "brown"}, {"red", "orange"}, {"orange", "brown"}, {"orange", "yellow"},
    {"purple", "brown"}, {"pink", "grey"}, {"black", "brown"}, {"purple", "blue"},
)  # fmt: skip
_LEAST_CONTRAST = 70
"""How far a thing's tone is from that of the ground, of 442 for black on white."""


@dataclass(frozen=True)
class Thing:
    """A shape; its place and its radius are parts of the drawing's height."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Drawing:
    image: Image.Image
    background: str
    things: tuple[Thing, ...]
    """From left to right."""


def shade(colour: str, random: Random) -> tuple[int, int, int]:
    """Return one of the many tones that have this name."""
    hue, saturation, value = (random.uniform(*limits) for limits in _HUES[colour])
    red, green, blue = colorsys.hsv_to_rgb(hue / 360 % 1, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def draw(random: Random, count: int = 0) -> Drawing:
    """Return a drawing of ``count`` things, or of one to three."""
    count = count or random.choices((1, 2, 3), (16, 3, 1))[0]
    side = random.randint(90, 200)
    # The model's processor makes any drawing a square, so the things in it are squeezed a little.
    width, height = round(side * random.uniform(0.85, 1.35)), side
    others = [colour for colour in COLOURS if colour != "white"]
    background = "white" if random.random() < 0.55 else random.choice(others)
    unlike = [each for each in COLOURS if {each, background} not in _ALIKE and each != background]
    colours = random.sample(unlike, count)
    ground = shade(background, random)
    image = Image.new("RGB", (width, height), ground)
    things = _places(random, colours, width / height)
    for thing in things:
        tone = shade(thing.colour, random)
        while math.dist(tone, ground) < _LEAST_CONTRAST:
            tone = shade(thing.colour, random)
        mask = _mask(random, thing, image.size)
        if box := mask.getbbox():
            image.paste(tone, box, mask.crop(box))
    return Drawing(image, background, things)


def _places(random: Random, colours: list[str], width: float) -> tuple[Thing, ...]:
    """Return things of these colours that do not touch, each in a column of its own."""
    column = width / len(colours)
    found = []
    for number, colour in enumerate(colours):
        most = min(column, 1.0) / 2 * 0.95
        radius = random.uniform(most * 0.55, most)
        x = random.uniform(column * number + radius, column * (number + 1) - radius)
        y = random.uniform(radius, 1 - radius)
        found.append(Thing(random.choice(KINDS), colour, x, y, radius))
    return tuple(found)


def _mask(random: Random, thing: Thing, size: tuple[int, int]) -> Image.Image:
    mask = Image.new("L", size)
    pen = ImageDraw.Draw(mask)
    height = size[1]
    radius = thing.radius * height
    strokes = _turned(random, thing.kind, _wobbly(random, _strokes(random, thing.kind)))
    # What is drawn stays within its circle, so that neighbours do not touch.
    reach = max(math.hypot(*point) for stroke in strokes for point in stroke)
    is_filled = thing.kind != "line" and random.random() < 0.6
    thickness = max(height / 36, radius * random.uniform(0.08, 0.3))
    scale = (radius - (0 if is_filled else thickness / 2)) / reach
    for stroke in strokes:
        points = [(thing.x * height + x * scale, thing.y * height + y * scale) for x, y in stroke]
        if is_filled:
            pen.polygon(points, fill=255)
        else:
            pen.line(points, fill=255, width=max(1, round(thickness)), joint="curve")
            for x, y in (points[0], points[-1]):
                half = thickness / 2
                pen.ellipse((x - half, y - half, x + half, y + half), fill=255)
    return mask


def _arc(x: float, y: float, rx: float, ry: float, start: float, stop: float) -> Stroke:
    """Return a part of an ellipse between two angles in degrees, clockwise from the right."""
    count = max(4, round(abs(stop - start) / 12))
    angles = [math.radians(start + (stop - start) * i / count) for i in range(count + 1)]
    return [(x + rx * math.cos(angle), y + ry * math.sin(angle)) for angle in angles]


def _path(*corners: Point) -> Stroke:
    """Return a way from corner to corner with points between them, which can wobble."""
    points = []
    for (ax, ay), (bx, by) in pairwise(corners):
        points += [(ax + (bx - ax) * i / 6, ay + (by - ay) * i / 6) for i in range(6)]
    return [*points, corners[-1]]


def _closed(*corners: Point) -> Stroke:
    return _path(*corners, corners[0])


def _strokes(random: Random, kind: str) -> list[Stroke]:
    if kind == "circle":
        return [_arc(0, 0, 1, 1, 0, 360)]
    if kind == "square":
        return [_closed((-1, -1), (1, -1), (1, 1), (-1, 1))]
    if kind == "triangle":
        angles = [math.radians(each + random.uniform(-14, 14)) for each in (-90, 30, 150)]
        return [_closed(*[(math.cos(angle), math.sin(angle)) for angle in angles])]
    if kind == "star":
        inner = random.uniform(0.36, 0.5)
        corners = [(math.radians(36 * i - 90), inner if i % 2 else 1.0) for i in range(10)]
        return [_closed(*[(r * math.cos(angle), r * math.sin(angle)) for angle, r in corners])]
    return [_path((-1, 0), (1, 0))]


def _wobbly(random: Random, strokes: list[Stroke]) -> list[Stroke]:
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


def _turned(random: Random, kind: str, strokes: list[Stroke]) -> list[Stroke]:
    """Return strokes turned as far as they stay what they are."""
    most = 180 if kind == "line" else 25
    # Most people draw upright.
    angle = math.radians(random.uniform(-most, most) if random.random() < 0.6 else 0)
    squeeze = random.uniform(0.85, 1.0)
    cos, sin = math.cos(angle), math.sin(angle)
    return [
        [(x * squeeze * cos - y * sin, x * squeeze * sin + y * cos) for x, y in stroke]
        for stroke in strokes
    ]
