"""Drawings for the demo model that sees: shapes and digits in colours, as by a hand."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

from plugins.tools.demo_trainer.vision.digits import DIGITS, printed, written
from plugins.tools.demo_trainer.vision.strokes import Stroke, arc, closed, path, wobbly

SHAPES = ("circle", "square", "triangle", "star", "line")
KINDS = SHAPES + DIGITS
_MIXED = SHAPES * 4 + DIGITS * 3
"""Any digit is drawn less often than any shape, but digits more often than shapes."""

_PRINTED = 0.08
"""The share of digits that are of a font; the others are written."""

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


Hand = Callable[[Random, str, float], list[Stroke]]
"""How a digit is written, with the drawing's width as a part of its height."""


@dataclass(frozen=True)
class Thing:
    """A shape or a digit; its place and its radius are parts of the drawing's height."""

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


def draw(
    random: Random, count: int = 0, kinds: Sequence[str] = _MIXED, hand: Hand | None = None
) -> Drawing:
    """Return a drawing of ``count`` things of these kinds, or of one to three.

    Its digits are written by ``hand``, or as those of the training are.
    """
    count = count or random.choices((1, 2, 3), (7, 4, 2))[0]
    side = random.randint(90, 200)
    # The model's processor makes any drawing a square, so the things in it are squeezed a little.
    width, height = round(side * random.uniform(0.85, 1.35)), side
    others = [colour for colour in COLOURS if colour != "white"]
    background = "white" if random.random() < 0.55 else random.choice(others)
    unlike = [each for each in COLOURS if {each, background} not in _ALIKE and each != background]
    colours = random.sample(unlike, count)
    ground = shade(background, random)
    image = Image.new("RGB", (width, height), ground)
    things = _places(random, colours, width / height, kinds)
    for thing in things:
        tone = shade(thing.colour, random)
        while math.dist(tone, ground) < _LEAST_CONTRAST:
            tone = shade(thing.colour, random)
        mask = _mask(random, thing, image.size, hand)
        if box := mask.getbbox():
            image.paste(tone, box, mask.crop(box))
    return Drawing(image, background, things)


def _places(
    random: Random, colours: list[str], width: float, kinds: Sequence[str]
) -> tuple[Thing, ...]:
    """Return things of these colours that do not touch, each in a column of its own."""
    column = width / len(colours)
    found = []
    for number, colour in enumerate(colours):
        most = min(column, 1.0) / 2 * 0.95
        radius = random.uniform(most * 0.55, most)
        x = random.uniform(column * number + radius, column * (number + 1) - radius)
        y = random.uniform(radius, 1 - radius)
        found.append(Thing(random.choice(kinds), colour, x, y, radius))
    return tuple(found)


def _mask(random: Random, thing: Thing, size: tuple[int, int], hand: Hand | None) -> Image.Image:
    mask = Image.new("L", size)
    width, height = size
    radius = thing.radius * height
    is_digit = thing.kind in DIGITS
    if is_digit and not hand and random.random() < _PRINTED:
        shown = printed(random, thing.kind, radius)
        left, top = thing.x * height - shown.width / 2, thing.y * height - shown.height / 2
        mask.paste(shown, (round(left), round(top)))
        return mask
    pen = ImageDraw.Draw(mask)
    if is_digit:
        strokes = (hand or written)(random, thing.kind, width / height)
    else:
        strokes = _strokes(random, thing.kind)
    strokes = _turned(random, thing.kind, wobbly(random, strokes))
    # What is drawn stays within its circle, so that neighbours do not touch.
    reach = max(math.hypot(*point) for stroke in strokes for point in stroke)
    is_filled = thing.kind not in ("line", *DIGITS) and random.random() < 0.6
    # The holes of digits stay open.
    thickest = 0.25 if is_digit else 0.3
    thickness = max(height / 36, radius * random.uniform(0.08, thickest))
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


def _strokes(random: Random, kind: str) -> list[Stroke]:
    if kind == "circle":
        return [arc(0, 0, 1, 1, 0, 360)]
    if kind == "square":
        return [closed((-1, -1), (1, -1), (1, 1), (-1, 1))]
    if kind == "triangle":
        angles = [math.radians(each + random.uniform(-14, 14)) for each in (-90, 30, 150)]
        return [closed(*[(math.cos(angle), math.sin(angle)) for angle in angles])]
    if kind == "star":
        inner = random.uniform(0.36, 0.5)
        corners = [(math.radians(36 * i - 90), inner if i % 2 else 1.0) for i in range(10)]
        return [closed(*[(r * math.cos(angle), r * math.sin(angle)) for angle, r in corners])]
    return [path((-1, 0), (1, 0))]


def _turned(random: Random, kind: str, strokes: list[Stroke]) -> list[Stroke]:
    """Return strokes turned as far as they stay what they are."""
    most = 180 if kind == "line" else 12 if kind in DIGITS else 25
    # Most people draw upright.
    angle = math.radians(random.uniform(-most, most) if random.random() < 0.6 else 0)
    squeeze = random.uniform(0.85, 1.0)
    cos, sin = math.cos(angle), math.sin(angle)
    return [
        [(x * squeeze * cos - y * sin, x * squeeze * sin + y * cos) for x, y in stroke]
        for stroke in strokes
    ]
