"""A pass that is played gives bit for bit what the model's own code gives, or it is not played."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, softmax

from llmserve_iterative.engine import Engine
from llmserve_iterative.engine.native import load_library
from llmserve_iterative.engine.noting import NotPlayable, Recorder
from llmserve_iterative.engine.tape import Memory, Tape
from llmserve_iterative.engine.tapes import Tapes

from .families import FAMILIES, PlainTokenizer, finish, generation, make_model
from .test_families import PADDED

Code = Callable[[torch.Tensor], torch.Tensor]
WEIGHT = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
ROWS = torch.arange(3)


def views(x: torch.Tensor) -> torch.Tensor:
    left, right = x.view(3, 2, 3).transpose(0, 1).unbind(0)
    return torch.cat([left + right[:, [2, 1, 0]], (left * 2).flip(1)], 1).reshape(2, 9)[:, 1:7]


def in_place(x: torch.Tensor) -> torch.Tensor:
    kept = torch.zeros(4, 6)
    kept.index_copy_(0, ROWS, x)
    kept[1] += 3
    y = kept.relu()
    y[:, ::2].mul_(0.5)
    return y.sum(0, keepdim=True)


def layers(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        first = layer_norm(x, (6,))
        second = softmax((first @ WEIGHT).to(torch.bfloat16), -1).float()
        x = x + gelu(second @ WEIGHT.t(), approximate="tanh") * torch.rsqrt(x.pow(2).mean() + 1)
    return x.argsort()[..., None] * 1.0 + x[..., None]


def several_results(x: torch.Tensor) -> torch.Tensor:
    values, places = x.sort(dim=-1)
    wide = torch.empty(3, 12)
    torch.cat([values, places.float()], 1, out=wide)
    return wide[:, 5:10].clone()


def noted(code: Code, x: torch.Tensor) -> Tape:
    with Recorder() as recorder:
        result = code(x)
    return Tape(recorder.notes, [x], result, Memory())


@torch.inference_mode()
@pytest.mark.parametrize("code", [views, in_place, layers, several_results])
def test_it_does_the_same_with_other_numbers(code: Code) -> None:
    tape = noted(code, torch.randn(3, 6))
    for seed in range(5):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))
        tape.inputs[0].copy_(x)
        assert torch.equal(tape.play(), code(x))


@torch.inference_mode()
@pytest.mark.parametrize(
    "code",
    [
        lambda x: x + 1 if x.sum() > 0 else x,
        lambda x: x * x.max().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero() * 1.0,
    ],
    ids=["branch", "number", "mask", "size"],
)
def test_what_depends_on_numbers_is_not_noted(code: Code) -> None:
    with pytest.raises(NotPlayable):
        noted(code, torch.randn(3, 6))


class Passes:
    """A model's code that says how often it has run."""

    def __init__(self, code: Code) -> None:
        self.code, self.count, self.tapes = code, 0, Tapes()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found = self.tapes.play(len(x), [x])
        return (
            found.clone() if found is not None else self.tapes.run(len(x), [x], lambda: self.run(x))
        )

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.code(x)


@torch.inference_mode()
def test_a_pass_that_comes_often_is_played_and_others_are_not() -> None:
    passes = Passes(layers)
    for turn in range(20):
        x = torch.randn(3 + (turn % 10 == 9), 6)
        assert torch.equal(passes(x), layers(x))
    assert passes.tapes.played > 10
    assert passes.count + passes.tapes.played == 20


class Count:
    """What no tape can know: how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return x * self.asked


@torch.inference_mode()
@pytest.mark.parametrize("code", [Count(), lambda x: x + torch.rand(3, 6), lambda x: x[x < 9]])
def test_what_cannot_be_played_is_left_to_the_code(code: Code) -> None:
    passes = Passes(code)
    for _ in range(8):
        passes(torch.randn(3, 6))
    assert passes.tapes.played == 0
    assert passes.count >= 8


@pytest.mark.skipif(load_library() is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in sorted(FAMILIES.keys() - PADDED)),
        *((family, torch.bfloat16) for family in ("gpt2", "llama", "gemma3")),
    ],
)
def test_every_family_is_played(family: str, dtype: torch.dtype) -> None:
    engine = Engine(make_model(family, dtype), PlainTokenizer(), max_sequences=4, cache_tokens=512)
    tapes: Any = engine._runner.tapes  # type: ignore[attr-defined]
    for length in (12, 16, 20):
        engine.admit(generation([length, 7, 8], length))
    finish(engine)
    assert tapes.played > 5
