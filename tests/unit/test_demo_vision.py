"""The demo model that sees: its size, and what it says of drawings that it was not trained on."""

from __future__ import annotations

import json
import math
import struct

import pytest

from llmserve.builder.source import ModelSource, resolve
from llmserve.demo import DEMO_VISION, demo_model_path
from plugins.tools.demo_trainer.vision.accuracy import held_out, score_of
from plugins.tools.demo_trainer.vision.drawings import COLOURS, KINDS
from plugins.tools.demo_trainer.vision.model import answers
from plugins.tools.demo_trainer.vision.questions import DESCRIBE, description

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
    for drawing in held_out(20, things=3):
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


def test_an_answer_names_all_that_is_drawn() -> None:
    (drawing,) = held_out(1)
    (thing,) = drawing.things
    said = description(drawing)
    assert said.startswith("I see a")
    assert f" {thing.colour} {thing.kind} on a" in said
    assert said.endswith(f" {drawing.background} background.")


@pytest.fixture(scope="module")
def right() -> dict[str, float]:
    score = score_of(FOLDER, held_out(40))
    return {what: score.share(what) for what in score.asked}


def test_it_sees_colours_and_shapes_of_drawings_that_it_has_not_seen(
    right: dict[str, float],
) -> None:
    # The model's page has what was measured with more of them.
    assert right["shapes"] >= 0.95
    assert right["colours"] >= 0.95
    assert right["backgrounds"] >= 0.95
    assert right["whole answers"] >= 0.9


def test_it_names_both_of_two_things() -> None:
    drawings = held_out(30, things=2)
    found = answers(FOLDER, [each.image for each in drawings], DESCRIBE)
    right = [
        answer == description(drawing) for drawing, answer in zip(drawings, found, strict=True)
    ]
    assert sum(right) >= 0.8 * len(right)
