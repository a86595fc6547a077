"""Measure how often the demo model that sees is right about drawings that it was not trained on.

python -m plugins.tools.demo_trainer.vision.accuracy
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from llmserve.demo import DEMO_VISION, demo_model_path
from plugins.tools.demo_trainer.vision.digits import DIGITS
from plugins.tools.demo_trainer.vision.drawings import (
    COLOURS,
    KINDS,
    SHAPES,
    Drawing,
    Hand,
    draw,
)
from plugins.tools.demo_trainer.vision.model import answers
from plugins.tools.demo_trainer.vision.other_hand import written
from plugins.tools.demo_trainer.vision.questions import (
    COLOUR,
    COUNT,
    DESCRIBE,
    DIGIT,
    colour,
    count,
    description,
    kind,
)

SEED = 7_000_000
"""Those of the training are strings, so its drawings are others."""
_THING = re.compile(rf"\b({'|'.join(COLOURS)}) ({'|'.join(KINDS)})\b")
ROWS: tuple[tuple[str, tuple[str, ...], Hand | None], ...] = (
    ("shape", SHAPES, None),
    ("digit", DIGITS, None),
    ("digit of another hand", DIGITS, written),
)
_GROUND = re.compile(r"on an? (\w+) background")


@dataclass
class Score:
    """How many answers there were of each kind, and how many of them were right."""

    asked: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, is_right: bool) -> None:
        self.asked[what] += 1
        self.right[what] += is_right

    def share(self, what: str) -> float:
        return self.right[what] / self.asked[what]


def held_out(
    amount: int,
    *,
    things: int = 1,
    kinds: Sequence[str] = SHAPES,
    hand: Hand | None = None,
    seed: int = SEED,
) -> list[Drawing]:
    random = Random(seed + things)
    return [draw(random, things, kinds, hand) for _ in range(amount)]


def score_of(folder: Path, drawings: Sequence[Drawing]) -> Score:
    """Ask what a model sees in drawings of one thing, and compare."""
    score = Score()
    found = answers(folder, [each.image for each in drawings], DESCRIBE)
    for drawing, answer in zip(drawings, found, strict=True):
        (thing,) = drawing.things
        tone, named = said.groups() if (said := _THING.search(answer)) else ("", "")
        ground = ground_said[1] if (ground_said := _GROUND.search(answer)) else ""
        score.add("kinds", named == thing.kind)
        score.add("colours", tone == thing.colour)
        score.add("backgrounds", ground == drawing.background)
        score.add("whole answers", answer == description(drawing))
    return score


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m plugins.tools.demo_trainer.vision.accuracy", description=__doc__
    )
    parser.add_argument("folder", type=Path, nargs="?", default=demo_model_path(DEMO_VISION))
    parser.add_argument("--drawings", type=int, default=500, help="default: %(default)s")
    options = parser.parse_args(arguments)
    for of, kinds, hand in ROWS:
        show(f"one {of}", score_of_one(options.folder, options.drawings, kinds, hand))
    several = {"shapes": SHAPES, "shapes and digits": KINDS}
    for of, kinds in several.items():
        for things in (2, 3):
            drawings = held_out(options.drawings // 5, things=things, kinds=kinds)
            show(f"{things} {of}", score_of_several(options.folder, drawings))


def score_of_one(folder: Path, amount: int, kinds: Sequence[str], hand: Hand | None) -> Score:
    drawings = held_out(amount, kinds=kinds, hand=hand)
    score = score_of(folder, drawings)
    images = [each.image for each in drawings]
    for asked, expected in ((COLOUR, colour), (DIGIT, kind)):
        for drawing, answer in zip(drawings, answers(folder, images, asked), strict=True):
            score.add(asked, answer == expected(drawing))
    return score


def score_of_several(folder: Path, drawings: Sequence[Drawing]) -> Score:
    score = Score()
    images = [each.image for each in drawings]
    for drawing, answer in zip(drawings, answers(folder, images, DESCRIBE), strict=True):
        named = {(each.colour, each.kind) for each in drawing.things}
        score.add("all of them", set(_THING.findall(answer)) == named)
    for drawing, answer in zip(drawings, answers(folder, images, COUNT), strict=True):
        score.add(COUNT, answer == count(drawing))
    return score


def show(title: str, score: Score) -> None:
    sys.stdout.write(f"{title}\n")
    for what, asked in score.asked.items():
        sys.stdout.write(f"    {what:32} {score.share(what):6.1%} of {asked}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
