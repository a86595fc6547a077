"""Sequences and how long their caches are, without a model; and what the plugin is told."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from llmserve.builder.plan import BuildSpec, make_plan
from llmserve.registry import Registry
from llmserve.runtime import Params, RequestError, Sampler, read_params
from llmserve.testing import ByteTokenizer
from llmserve_gpt2.session.sequences import (
    FIRST,
    ClientSequence,
    Lane,
    Sequences,
    StepRequest,
    rooms,
)
from tests.support import generation


def sequence(seen: float = 0.0) -> ClientSequence:
    one = generation([65], 4)
    return ClientSequence(one, Sampler(one, ByteTokenizer()), 1, seen)


def test_a_second_start_gives_up_the_first() -> None:
    sequences = Sequences(slots=2, idle_seconds=5)
    first, second = sequence(), sequence()
    sequences.start("a", first)
    assert sequences.start("a", second) == [first]
    assert sequences.step("a", 1.0) is second


def test_who_was_seen_lately_is_waited_for_unless_done() -> None:
    sequences = Sequences(slots=4, idle_seconds=5)
    here, lately, before = sequence(3.0), sequence(2.0), sequence(1.0)
    for key, one in enumerate((here, lately, before)):
        sequences.start(key, one)
    assert sequences.apart([here], since=2.0)
    assert not sequences.apart([here], since=2.5)
    assert not sequences.apart([here, lately], since=2.0)
    for _ in range(4):
        lately.generation.push(66)
    assert not sequences.apart([here], since=2.0)


def test_a_lane_masks_what_is_no_token() -> None:
    lane = Lane()
    assert lane.held == FIRST
    assert lane.mask(3, 6).tolist() == [0, 0, 0, 1, 1, 1]
    lane.grow(3, 6)
    assert lane.positions(1).tolist() == [3]
    assert lane.mask(1, 9).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("held", "longest", "gap", "expected"),
    [
        ([9, 3, 5], 64, 64, [10, 10, 10]),
        ([9, 3, 5], 64, 4, [10, 6, 10]),
        ([90, 3, 5], 64, 64, [91, 6, 6]),
        ([90, 80, 5], 64, sys.maxsize, [91, 81, 6]),
        ([4], 64, 64, [5]),
    ],
)
def test_lanes_grow_to_one_length_where_that_pays(
    held: list[int], longest: int, gap: int, expected: list[int]
) -> None:
    lanes = [Lane(length, 1) for length in held]
    assert rooms(lanes, [1] * len(lanes), longest=longest, gap=gap) == expected


def test_the_layout_is_still_taken_by_its_old_name() -> None:
    plan = make_plan(BuildSpec("gpt2-onnx", "demo", options={"layout": "seed"}), Registry.load())
    assert plan.options["layout"] == "tutorial"
    assert list(plan.notices) == ["layout=seed is called layout=tutorial now"]


def test_what_a_request_asks_for_reaches_the_session_unchanged() -> None:
    params = read_params(
        {
            "stop_words": ["a", "b"],
            "logit_bias": {"5": 1.5, "7": -100},
            "temperature": 0.5,
            "seed": 2**64 - 1,
            "stream": True,
        }
    )
    sent = StepRequest("Héllo", (1, 2), params, 3)
    tensors = {
        "params": np.array([[sent.write().encode()]], np.object_),
        "prompt_ids": np.array([[1, 2]]),
    }
    assert StepRequest.read(tensors) == sent


@pytest.mark.parametrize(
    ("late", "told"),
    [
        (StepRequest("Hello", (), Params(), 1), "the prompt is sent once"),
        (StepRequest("", (), Params(temperature=0.7), 1), "temperature is said with"),
    ],
)
def test_what_belongs_to_the_start_is_refused_later(late: StepRequest, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        late.refuse_as_step(Params(temperature=0.5))
