"""Tests of sequences and the lengths of their caches, without a model."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from llmserve.plugin import BuildSpec, Registry, make_plan
from llmserve.runtime import Params, RequestError, Sampler, read_params
from llmserve.testing import ByteTokenizer, generation
from llmserve_gpt2.session.sequences import (
    INITIAL_LENGTH,
    Cache,
    ClientSequence,
    Sequences,
    StepRequest,
    next_lengths,
)


def sequence(last_active: float = 0.0) -> ClientSequence:
    answer = generation([65], 4)
    return ClientSequence(answer, Sampler(answer, ByteTokenizer()), 1, last_active)


def test_a_second_start_replaces_the_first() -> None:
    sequences = Sequences(slots=2, idle_seconds=5)
    first, second = sequence(), sequence()
    sequences.start("a", first)
    assert sequences.start("a", second) == [first]
    assert sequences.step("a", 1.0) is second


def test_recently_active_sequences_count_as_others_unless_done() -> None:
    sequences = Sequences(slots=4, idle_seconds=5)
    current, recent, old = sequence(3.0), sequence(2.0), sequence(1.0)
    for key, started in enumerate((current, recent, old)):
        sequences.start(key, started)
    assert sequences.has_others([current], since=2.0)
    assert not sequences.has_others([current], since=2.5)
    assert not sequences.has_others([current, recent], since=2.0)
    for _ in range(4):
        recent.generation.push(66)
    assert not sequences.has_others([current], since=2.0)


def test_a_cache_masks_slots_without_tokens() -> None:
    cache = Cache()
    assert cache.length == INITIAL_LENGTH
    assert cache.mask(3, 6).tolist() == [0, 0, 0, 1, 1, 1]
    cache.grow(3, 6)
    assert cache.positions(1).tolist() == [3]
    assert cache.mask(1, 9).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("lengths", "longest", "gap", "expected"),
    [
        ([9, 3, 5], 64, 64, [10, 10, 10]),
        ([9, 3, 5], 64, 4, [10, 6, 10]),
        ([90, 3, 5], 64, 64, [91, 6, 6]),
        ([90, 80, 5], 64, sys.maxsize, [91, 81, 6]),
        ([4], 64, 64, [5]),
    ],
)
def test_caches_grow_to_one_length_if_that_is_worthwhile(
    lengths: list[int], longest: int, gap: int, expected: list[int]
) -> None:
    caches = [Cache(length, 1) for length in lengths]
    assert next_lengths(caches, [1] * len(caches), longest=longest, gap=gap) == expected


def test_the_old_name_of_the_layout_is_still_accepted() -> None:
    plan = make_plan(BuildSpec("gpt2-onnx", "demo", options={"layout": "seed"}), Registry.load())
    assert plan.options["layout"] == "tutorial"
    assert list(plan.notices) == ["layout=seed is now called layout=tutorial"]


def test_request_parameters_reach_the_session_unchanged() -> None:
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
    ("step", "message"),
    [
        (StepRequest("Hello", (), Params(), 1), "the prompt is sent once"),
        (StepRequest("", (), Params(temperature=0.7), 1), "temperature must be set with"),
    ],
)
def test_parameters_of_the_start_are_refused_later(step: StepRequest, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        step.refuse_as_step(Params(temperature=0.5))
