"""Digits as hands write them, in the ways that people learn at school, and some as printed."""

from __future__ import annotations

from random import Random

from PIL import Image, ImageDraw, ImageFont

from plugins.tools.demo_trainer.vision.strokes import Point, Stroke, arc, centred, curve, path

DIGITS = tuple("0123456789")

WIDEST_ZERO = 0.62
"""Of its height, in what the model sees: a wider ring is a circle."""
_PRINTED = 200
"""The size of a printed digit in pixels before it is made as large as it is shown."""

# A way to write a digit: strokes through points, of which a box of 1.1 x 2 around 0 is full. A
# stroke is of straight lines (-), or smooth (~); a smooth one goes on where another ends (>), so
# that there is a corner between them.
_Way = tuple[tuple[str, tuple[Point, ...]], ...]
_WAYS: dict[str, tuple[_Way, ...]] = {
    "1": (
        (("-", ((-0.3, -0.6), (0.1, -1), (0.1, 1))),),
        (("-", ((-0.5, -0.15), (0.12, -1), (0.12, 1))),),
        (("-", ((-0.28, -0.65), (0.05, -1), (0.05, 1))), ("-", ((-0.4, 1), (0.45, 1)))),
        (("-", ((-0.4, -0.4), (0.05, -1), (0.05, 1))), ("-", ((-0.3, 1), (0.35, 1)))),
    ),
    "2": (
        (
            ("~", (
                (-0.5, -0.6), (-0.2, -0.95), (0.25, -0.95), (0.5, -0.6), (0.3, -0.1), (-0.55, 1),
            )),
            (">", ((-0.55, 1), (0.6, 1))),
        ),
        (
            ("~", ((-0.45, -0.8), (0, -1), (0.45, -0.8), (0.4, -0.3), (-0.1, 0.4), (-0.55, 0.95))),
            (">", ((-0.55, 0.95), (-0.2, 0.85), (0.2, 0.98), (0.55, 0.85))),
        ),
        (
            ("~", (
                (-0.45, -0.65), (-0.1, -1), (0.4, -0.8), (0.35, -0.3), (-0.1, 0.45), (-0.45, 0.9),
                (-0.58, 0.75), (-0.3, 0.62), (0.1, 0.85), (0.6, 0.9),
            )),
        ),
        (("-", ((-0.5, -1), (0.45, -1), (0.5, -0.1), (-0.5, 0.1), (-0.5, 1), (0.5, 1))),),
    ),
    "3": (
        (
            ("~", ((-0.5, -0.75), (-0.1, -1), (0.42, -0.8), (0.4, -0.35), (-0.1, -0.08))),
            (">", (
                (-0.1, -0.08), (0.42, 0.1), (0.55, 0.55), (0.1, 1), (-0.3, 0.95), (-0.55, 0.65),
            )),
        ),
        (
            ("-", ((-0.5, -1), (0.45, -1), (-0.08, -0.2))),
            (">", (
                (-0.08, -0.2), (0.4, -0.05), (0.55, 0.45), (0.15, 0.97), (-0.3, 0.95), (-0.55, 0.7),
            )),
        ),
        (
            ("~", (
                (-0.45, -0.85), (0.05, -1), (0.42, -0.65), (0.1, -0.2), (-0.05, -0.08), (0.15, 0),
                (0.5, 0.35), (0.35, 0.85), (-0.1, 1), (-0.5, 0.85),
            )),
        ),
    ),
    "4": (
        (("-", ((-0.2, -1), (-0.5, 0.25), (0.6, 0.25))), ("-", ((0.3, -0.4), (0.22, 1)))),
        (("-", ((0.25, 1), (0.25, -1), (-0.6, 0.35), (0.6, 0.35))),),
        (("-", ((0.2, -1), (-0.6, 0.3), (0.6, 0.3))), ("-", ((0.25, -0.2), (0.25, 1)))),
        (
            ("~", ((-0.48, -0.95), (-0.5, -0.2), (-0.2, 0), (0.42, -0.05))),
            ("-", ((0.45, -1), (0.4, 1))),
        ),
        (("-", ((-0.45, -1), (-0.5, 0.1), (0.45, 0.1))), ("-", ((0.4, -1), (0.4, 1)))),
    ),
    "5": (
        (
            ("-", ((0.5, -1), (-0.38, -1), (-0.45, -0.15))),
            (">", (
                (-0.45, -0.15), (-0.05, -0.3), (0.42, -0.08), (0.55, 0.4), (0.2, 0.92), (-0.25, 1),
                (-0.55, 0.75),
            )),
        ),
        (
            ("-", ((-0.35, -0.95), (-0.42, -0.1))),
            (">", ((-0.42, -0.1), (0.1, -0.25), (0.5, 0.1), (0.45, 0.7), (0, 1), (-0.5, 0.85))),
            ("-", ((-0.35, -0.97), (0.5, -1))),
        ),
        (
            ("~", (
                (0.45, -0.95), (-0.1, -1), (-0.4, -0.75), (-0.35, -0.35), (0.1, -0.2), (0.48, 0.1),
                (0.4, 0.75), (-0.05, 1), (-0.5, 0.85),
            )),
        ),
        (
            ("-", ((0.5, -1), (-0.4, -1), (-0.4, -0.1), (0.15, -0.1))),
            (">", ((0.15, -0.1), (0.5, 0.15), (0.5, 0.7), (0.15, 1), (-0.5, 1))),
        ),
    ),
    "6": (
        (
            ("~", (
                (0.4, -0.95), (-0.1, -0.7), (-0.5, 0), (-0.5, 0.6), (-0.1, 1), (0.38, 0.82),
                (0.5, 0.4), (0.2, 0.02), (-0.2, 0.1), (-0.5, 0.45),
            )),
        ),
        (
            ("~", (
                (0.2, -1), (-0.15, -0.45), (-0.45, 0.3), (-0.42, 0.8), (0, 1), (0.42, 0.75),
                (0.42, 0.3), (0.05, 0.05), (-0.4, 0.35),
            )),
        ),
        (
            ("~", (
                (0.48, -0.7), (0.15, -1), (-0.3, -0.75), (-0.52, -0.1), (-0.45, 0.7), (0, 1),
                (0.45, 0.75), (0.45, 0.2), (0.05, -0.05), (-0.35, 0.15), (-0.5, 0.5),
            )),
        ),
    ),
    "7": (
        (("-", ((-0.5, -0.97), (0.5, -0.97), (-0.1, 1))),),
        (("-", ((-0.5, -0.97), (0.52, -0.97), (-0.05, 1))), ("-", ((-0.22, 0.05), (0.45, 0.02)))),
        (("-", ((-0.52, -0.65), (-0.5, -0.97), (0.5, -0.97), (-0.1, 1))),),
        (
            ("-", ((-0.52, -0.95), (0.5, -1))),
            (">", ((0.5, -1), (0.2, -0.4), (-0.02, 0.3), (-0.08, 1))),
        ),
        (
            ("~", ((-0.52, -0.72), (-0.38, -0.95), (0.05, -0.85), (0.5, -0.98))),
            (">", ((0.5, -0.98), (0.15, -0.1), (-0.1, 1))),
            ("-", ((-0.25, 0), (0.4, -0.02))),
        ),
    ),
    "8": (
        (
            ("~", (
                (0.38, -0.78), (0, -1), (-0.4, -0.75), (-0.3, -0.3), (0.15, 0), (0.5, 0.4),
                (0.3, 0.92), (-0.25, 0.95), (-0.5, 0.5), (-0.2, 0.05), (0.25, -0.25), (0.42, -0.65),
                (0.2, -0.97),
            )),
        ),
        (
            ("~", (
                (0, -0.05), (-0.38, -0.4), (-0.25, -0.9), (0.2, -0.95), (0.4, -0.5), (0, -0.05),
                (-0.48, 0.35), (-0.35, 0.9), (0.2, 1), (0.5, 0.55), (0.1, -0.02),
            )),
        ),
        (
            ("~", (
                (0.02, -1), (-0.38, -0.75), (-0.3, -0.25), (0.02, -0.1), (0.36, -0.3),
                (0.38, -0.75),
                (0.02, -1),
            )),
            ("~", (
                (0, -0.1), (-0.45, 0.2), (-0.42, 0.8), (0, 1), (0.44, 0.8), (0.45, 0.2), (0, -0.1),
            )),
        ),
    ),
    "9": (
        (
            ("~", (
                (0.45, -0.55), (0.2, -0.15), (-0.25, -0.15), (-0.48, -0.55), (-0.2, -0.95),
                (0.25, -0.95), (0.45, -0.6),
            )),
            (">", ((0.45, -0.6), (0.42, 0.2), (0.35, 1))),
        ),
        (
            ("~", (
                (0.42, -0.7), (0.05, -1), (-0.42, -0.75), (-0.42, -0.25), (0, -0.05), (0.4, -0.4),
                (0.46, -0.75), (0.45, 0.1), (0.25, 0.8), (-0.1, 1), (-0.42, 0.8),
            )),
        ),
        (
            ("~", (
                (0.4, -0.85), (-0.1, -1), (-0.46, -0.6), (-0.2, -0.15), (0.2, -0.3), (0.42, -0.8),
            )),
            (">", ((0.42, -0.8), (0.25, 0), (-0.12, 1))),
        ),
    ),
}  # fmt: skip


def written(random: Random, digit: str, aspect: float) -> list[Stroke]:
    """Return a digit's strokes; ``aspect`` is of the drawing, which the model sees as a square."""
    strokes = _zero(random, aspect) if digit == "0" else _one_way(random, digit)
    slant = random.gauss(0.12, 0.14)
    return centred([[(x - slant * y, y) for x, y in stroke] for stroke in strokes])


def _one_way(random: Random, digit: str) -> list[Stroke]:
    unsteady = random.choice((0.02, 0.05, 0.08))
    # No hand has the same widths as another, nor the same middle.
    wide, middle = random.uniform(0.68, 1.35), random.uniform(-0.2, 0.2)

    def moved(point: Point) -> Point:
        x, y = point
        # The ends stay, and what is between goes up or down.
        y += middle * (1 - y * y)
        return x * wide + random.gauss(0, unsteady), y + random.gauss(0, unsteady)

    strokes: list[Stroke] = []
    for kind, points in random.choice(_WAYS[digit]):
        shown = [moved(point) for point in points]
        if kind == ">":
            strokes[-1] += curve(strokes[-1][-1], *shown[1:])
        else:
            strokes.append(path(*shown) if kind == "-" else curve(*shown))
    return strokes


def _zero(random: Random, aspect: float) -> list[Stroke]:
    width = min(random.uniform(0.4, 0.75), WIDEST_ZERO * aspect * random.uniform(0.7, 1.0))
    # It begins near the top, and its end does not always meet its beginning.
    start, around = random.gauss(-80, 25), random.choice((-1, 1)) * random.gauss(365, 10)
    ring = arc(0, 0, width, 1, start, start + around)
    # An egg is wider at one end.
    egg = random.gauss(0, 0.08)
    strokes = [[(x * (1 + egg * y), y) for x, y in ring]]
    if random.random() < 0.08:
        strokes.append(path((width * 0.8, -0.8), (-width * 0.8, 0.8)))
    return strokes


def printed(random: Random, digit: str, radius: float) -> Image.Image:
    """Return a digit of Pillow's own font as a mask, within a circle of this radius in pixels."""
    font = ImageFont.load_default(_PRINTED)
    large = Image.new("L", (_PRINTED * 2, _PRINTED * 2))
    bold = random.choice((0, 0, 3, 8))
    pen = ImageDraw.Draw(large)
    pen.text((_PRINTED, _PRINTED), digit, 255, font=font, anchor="mm", stroke_width=bold)
    large = large.rotate(random.gauss(0, 5), Image.Resampling.BICUBIC)
    large = large.crop(large.getbbox())
    width, height = large.width * random.uniform(0.75, 1.2), float(large.height)
    scale = 2 * radius / (width**2 + height**2) ** 0.5
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return large.resize(size, Image.Resampling.BICUBIC)
