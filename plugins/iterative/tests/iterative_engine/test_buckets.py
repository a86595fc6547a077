"""Passes come in few sizes, so that what oneDNN keeps for each stays bounded."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmserve_iterative.engine import Engine
from llmserve_iterative.engine.buckets import bucket
from llmserve_iterative.engine.packed import PackedLinear

from .families import VOCAB, PlainTokenizer, finish, generation, make_model, same_as_alone


@given(st.integers(1, 100_000))
def test_a_size_is_at_most_an_eighth_above(rows: int) -> None:
    assert rows <= bucket(rows) <= max(rows, rows * 9 / 8)
    assert bucket(bucket(rows)) == bucket(rows)


def test_there_are_few_sizes() -> None:
    assert len({bucket(rows) for rows in range(1, 289)}) <= 50


@pytest.mark.parametrize("rows", [1, 5, 17, 33, 70])
@pytest.mark.parametrize("outer", [(), (1,)])
def test_a_packed_layer_gives_what_the_plain_one_gives(rows: int, outer: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(24, 40)
    packed = PackedLinear(plain.weight.detach(), plain.bias.detach())
    x = torch.randn(*outer, rows, 24)
    with torch.inference_mode():
        assert packed(x).shape == plain(x).shape
        assert torch.allclose(packed(x), plain(x), atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_whatever_comes_the_products_have_those_sizes(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways of running a model, the flat and the padded one."""
    seen = set()
    product = PackedLinear._product

    def spy(layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        seen.add(x.shape[:-1].numel())
        return product(layer, x)

    monkeypatch.setattr(PackedLinear, "_product", spy)
    engine = Engine(
        make_model(family), PlainTokenizer(), max_sequences=20, cache_tokens=4096, prefill_chunk=64
    )
    chance = random.Random(1)
    several = [
        generation([chance.randrange(VOCAB) for _ in range(chance.randint(1, 80))], 20)
        for _ in range(40)
    ]
    for one in several:
        engine.admit(one)
        engine.step()
    finish(engine)
    assert all(same_as_alone(family, one) for one in several)
    assert seen
    assert all(rows == bucket(rows) for rows in seen)
