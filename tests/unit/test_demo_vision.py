"""The demo model that sees: its size, and what it says of drawings that it was not trained on."""

from __future__ import annotations

import json
import math
import struct
from random import Random

import numpy as np
import pytest

from llmserve.builder.source import ModelSource, resolve
from llmserve.demo import DEMO_VISION, demo_model_path
from plugins.tools.demo_trainer.vision import digits, other_hand
from plugins.tools.demo_trainer.vision.accuracy import held_out, score_of
from plugins.tools.demo_trainer.vision.digits import DIGITS, WIDEST_ZERO
from plugins.tools.demo_trainer.vision.drawings import COLOURS, KINDS, SHAPES, Hand
from plugins.tools.demo_trainer.vision.model import answers
from plugins.tools.demo_trainer.vision.questions import DESCRIBE, DIGIT, description, kind
from plugins.tools.demo_trainer.vision.training import example, mirrored

FOLDER = demo_model_path(DEMO_VISION)


def test_the_weights_are_small_and_stored_once() -> None:
    file = FOLDER / "model.safetensors"
    assert file.stat().st_size <= 2_500_000
    with file.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        weights = json.loads(opened.read(size))
    weights.pop("__metadata__")
    assert {entry["dtype"] for entry in weights.values()} == {"F16"}
    assert sum(math.prod(entry["shape"]) for entry in weights.values()) <= 2_000_000
    assert not any("lm_head" in name for name in weights), "it is the embedding"


def test_it_is_found_by_its_name_and_described_without_a_path() -> None:
    found = resolve(DEMO_VISION, report=lambda _: None)
    assert found == ModelSource(DEMO_VISION, FOLDER)
    assert found.is_demo
    assert found.described() == {"kind": "demo", "name": DEMO_VISION}


def test_a_drawing_has_things_apart_with_colours_of_their_own() -> None:
    for drawing in held_out(20, things=3, kinds=KINDS):
        assert drawing.image.mode == "RGB"
        xs = [each.x for each in drawing.things]
        assert xs == sorted(xs)
        colours = [drawing.background, *(each.colour for each in drawing.things)]
        assert len(set(colours)) == 4
        assert {*colours} <= {*COLOURS}
        assert {each.kind for each in drawing.things} <= {*KINDS}
        first, second, third = drawing.things
        assert first.x + first.radius <= second.x - second.radius + 1e-9
        assert second.x + second.radius <= third.x - third.radius + 1e-9


@pytest.mark.parametrize("hand", [None, other_hand.written])
def test_a_digit_is_drawn_the_same_from_one_seed_and_never_filled(hand: Hand | None) -> None:
    for digit in DIGITS:
        (drawing,), (again,) = (held_out(1, kinds=(digit,), hand=hand) for _ in range(2))
        assert drawing == again
        (thing,) = drawing.things
        assert thing.kind == digit
        # What is in it stays within its circle, and covers less than half of that.
        shown = np.asarray(drawing.image).astype(int)
        height = len(shown)
        is_inked = np.abs(shown - shown[0, 0]).max(axis=2) > 20
        ys, xs = np.nonzero(is_inked)
        away = np.hypot(xs + 0.5 - thing.x * height, ys + 0.5 - thing.y * height)
        assert away.max() <= thing.radius * height + 2
        assert 0 < is_inked.sum() < 0.5 * math.pi * (thing.radius * height) ** 2


@pytest.mark.parametrize("hand", [digits.written, other_hand.written])
def test_a_zero_is_narrower_than_any_circle_in_what_the_model_sees(hand: Hand) -> None:
    random = Random(3)
    for _ in range(200):
        aspect = random.uniform(0.85, 1.35)
        (ring, *_) = hand(random, "0", aspect)
        height = max(y for _, y in ring)
        # In the middle, since it may lean; a trembling hand is a little wider.
        across = [x for x, y in ring if abs(y) < 0.2 * height]
        assert (max(across) - min(across)) / 2 / height / aspect < WIDEST_ZERO * 1.2


def test_a_digit_has_no_mirror_image() -> None:
    digit, star = (example(*held_out(1, kinds=(each,))) for each in ("7", "star"))
    assert (mirrored(digit).pixels == digit.pixels).all()
    assert (mirrored(star).pixels == star.pixels[:, ::-1]).all()


def test_an_answer_names_all_that_is_drawn() -> None:
    (drawing,) = held_out(1)
    (thing,) = drawing.things
    said = description(drawing)
    assert said.startswith("I see a")
    assert f" {thing.colour} {thing.kind} on a" in said
    assert said.endswith(f" {drawing.background} background.")


@pytest.mark.parametrize(
    ("kinds", "hand"), [(SHAPES, None), (DIGITS, None), (DIGITS, other_hand.written)]
)
def test_it_sees_colours_shapes_and_digits_of_drawings_that_it_has_not_seen(
    kinds: tuple[str, ...], hand: Hand | None
) -> None:
    score = score_of(FOLDER, held_out(40, kinds=kinds, hand=hand))
    # The model's page has what was measured with more of them.
    assert score.share("kinds") >= 0.95
    assert score.share("colours") >= 0.95
    assert score.share("backgrounds") >= 0.95
    assert score.share("whole answers") >= 0.9


def test_it_says_which_digit_it_is() -> None:
    drawings = held_out(20, kinds=DIGITS)
    found = answers(FOLDER, [each.image for each in drawings], DIGIT)
    right = [answer == kind(drawing) for drawing, answer in zip(drawings, found, strict=True)]
    assert sum(right) >= 0.9 * len(right)
    assert kind(*held_out(1, kinds=("8",))) == "It is an 8."


def test_it_names_both_of_two_things() -> None:
    drawings = held_out(30, things=2)
    found = answers(FOLDER, [each.image for each in drawings], DESCRIBE)
    right = [
        answer == description(drawing) for drawing, answer in zip(drawings, found, strict=True)
    ]
    assert sum(right) >= 0.8 * len(right)
