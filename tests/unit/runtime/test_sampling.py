"""Tokens are chosen by the parameters of the request, and by nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.runtime.answer.generation import Generation
from llmserve.runtime.answer.params import Params
from llmserve.runtime.answer.sampling import Sampler, nucleus
from llmserve.testing import fake

EOS = 7
LOGITS = np.array([0.0, 3.0, 2.0, 1.0, -1.0, 0.5, -2.0, 4.0], dtype=np.float32)


class Letters:
    """A tokenizer whose ids are the positions of letters in the alphabet."""

    eos_ids = frozenset({EOS})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [ord(letter) - ord("a") for letter in text.strip()]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return []

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


def generation(prompt: Sequence[int] = (), output: Sequence[int] = (), **params: Any) -> Generation:
    end = frozenset({EOS})
    new = fake.generation(prompt, 99, eos=end, decode=Letters().decode, **params)
    for token in output:
        new.push(token)
    return new


def sampler(prompt: Sequence[int] = (), output: Sequence[int] = (), **params: Any) -> Sampler:
    return Sampler(generation(prompt, output, **params), Letters())


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 5.0, "top_k": 3}, {7, 1, 2}),
        # softmax gives 7 about 0.63, 1 about 0.23 and 2 about 0.085.
        ({"temperature": 1.0, "top_p": 0.5}, {7}),
        ({"temperature": 1.0, "top_p": 0.8}, {7, 1}),
        ({"temperature": 1.0, "min_p": 0.3}, {7, 1}),
        ({"temperature": 50.0}, set(range(8))),
        # A temperature near zero is greedy.
        *(({"temperature": tiny}, {7}) for tiny in (1e-60, 1e-38, 1e-6, 0.001)),
    ],
)
def test_which_tokens_can_be_drawn(params: dict[str, Any], expected: set[int]) -> None:
    chooser = sampler(seed=1, **params)
    assert {chooser.choose(LOGITS) for _ in range(3000)} == expected


@pytest.mark.parametrize(
    ("prompt", "output", "params", "scores", "expected"),
    [
        ([], [], {}, LOGITS, 7),
        ([], [], {"temperature": 5.0, "top_k": 1}, LOGITS, 7),
        ([], [1], {"min_tokens": 2}, LOGITS, 1),
        ([], [1], {"min_tokens": 1}, LOGITS, 7),
        ([], [], {"bad_words": ("h",)}, LOGITS, 1),
        ([], [1], {"bad_words": ("bh",)}, LOGITS, 1),
        ([], [2], {"bad_words": ("bh",)}, LOGITS, 7),
        ([7], [], {"repetition_penalty": 2.0}, LOGITS, 1),
        # A negative score gets lower, not higher.
        ([0], [], {"repetition_penalty": 2.0}, [-1.0, -1.5], 1),
        ([7], [], {"presence_penalty": 3.0}, LOGITS, 7),
        ([], [1, 1, 1], {"frequency_penalty": 0.3}, [0.0, 3.0, 2.0, 1.0], 1),
        ([], [1, 1, 1], {"frequency_penalty": 0.4}, [0.0, 3.0, 2.0, 1.0], 2),
        ([], [1, 1, 1], {"presence_penalty": 1.1}, [0.0, 3.0, 2.0, 1.0], 2),
    ],
)
def test_the_likeliest_token_that_may_be_chosen(
    prompt: list[int], output: list[int], params: dict[str, Any], scores: Any, expected: int
) -> None:
    logits = np.array(scores, dtype=np.float32)
    assert sampler(prompt, output, **params).choose(logits) == expected


@given(
    st.floats(1e-300, 100), st.floats(0.01, 100), st.floats(-100, 100), st.integers(0, 2**64 - 1)
)
def test_extreme_parameters_choose_a_valid_token(
    temperature: float, repetition: float, presence: float, seed: int
) -> None:
    chooser = sampler(
        prompt=[1, 2], output=[3], temperature=temperature, repetition_penalty=repetition,
        presence_penalty=presence, seed=seed,
    )  # fmt: skip
    logits = np.array([1e4, -1e4, 3e38, -3e38, 0, np.inf * -1, 5, 6], dtype=np.float32)
    assert 0 <= chooser.choose(logits) < logits.size
    assert chooser.choose(logits) != 5


def test_an_end_token_that_the_model_does_not_have_is_ignored() -> None:
    end = frozenset({2**31 - 1, EOS})
    new = fake.generation([1], 9, eos=end, min_tokens=3)
    assert Sampler(new, Letters()).choose(LOGITS) == 1


def test_the_logits_are_not_modified() -> None:
    before = LOGITS.copy()
    sampler(prompt=[7], repetition_penalty=2.0, min_tokens=3).choose(LOGITS)
    assert np.array_equal(before, LOGITS)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32))
def test_a_seed_gives_the_same_tokens_whatever_else_draws(seed: int, other: int) -> None:
    rows = np.random.default_rng(other).normal(size=(5, 50)).astype(np.float32)
    alone, interleaved = (sampler(temperature=1.0, seed=seed) for _ in range(2))
    neighbour = sampler(temperature=1.0, seed=other)
    expected = [alone.choose(row) for row in rows]
    tokens = []
    for row in rows:
        neighbour.choose(row)
        tokens.append(interleaved.choose(row))
    assert tokens == expected


def test_without_a_seed_answers_differ() -> None:
    flat = np.zeros(1000, dtype=np.float32)
    first, second = sampler(temperature=1.0), sampler(temperature=1.0)
    assert [first.choose(flat) for _ in range(8)] != [second.choose(flat) for _ in range(8)]


def size_of_nucleus(weights: np.ndarray[Any, Any], top_p: float) -> int:
    """Return the smallest number of weights that reach a share of their sum, by sorting all."""
    return int(np.searchsorted(np.cumsum(np.sort(weights)[::-1]), top_p * weights.sum())) + 1


@given(
    st.integers(0, 2**32),
    st.sampled_from([3, 400, 5000]),
    st.sampled_from([0.0, 0.5, 2.0, 6.0]),
    st.floats(0.01, 0.99),
)
def test_a_nucleus_is_the_smallest_set_that_reaches_top_p(
    number: int, size: int, spread: float, top_p: float
) -> None:
    """However wide it is: from one token to all, with ties and without."""
    scores = np.random.default_rng(number).normal(size=size) * spread
    weights = np.exp(scores - scores.max())
    places = nucleus(weights, top_p)
    assert list(places) == sorted(set(places.tolist()))
    assert abs(places.size - min(size, size_of_nucleus(weights, top_p))) <= 1
    assert weights[places].sum() >= top_p * weights.sum() * (1 - 1e-12)
    left_out = np.delete(weights, places)
    assert not left_out.size or left_out.max() <= weights[places].min()


@given(st.integers(0, 2**32), st.sampled_from([{"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.01}]))
def test_the_last_digit_of_a_score_does_not_change_the_draw(
    number: int, params: dict[str, Any]
) -> None:
    """It differs when other requests share the forward pass; tokens may be equally likely."""
    rng = np.random.default_rng(number)
    # Steps of a tenth make many ties; the gap below a set prevents ties at its border.
    row = (np.round(rng.normal(size=1000), 1) * 4).astype(np.float32)
    row[row < 4] = -50
    noise = (rng.normal(size=1000) * 1e-6).astype(np.float32)
    if "top_k" in params:
        params = {"top_k": max(2, int((row > 0).sum()))}
    if "top_p" in params:
        params = {"top_p": 1 - 1e-9}
    exact, noisy = (sampler(temperature=1.0, seed=number, **params) for _ in range(2))
    draws = [(exact.choose(row), noisy.choose(row + noise)) for _ in range(20)]
    # A draw within a millionth of a border may fall on either side of it.
    assert sum(first != second for first, second in draws) <= 1


@given(st.integers(0, 2**64 - 1), st.integers(0, 9))
def test_a_sampler_created_midway_continues_as_the_first_would(seed: int, start: int) -> None:
    rows = np.random.default_rng(1).normal(size=(10, 50)).astype(np.float32)
    whole = generation(temperature=1.0, seed=seed, frequency_penalty=0.5, ignore_eos=True)
    chooser = Sampler(whole, Letters())
    for row in rows:
        whole.push(chooser.choose(row))
    resumed = generation(
        output=whole.token_ids[:start],
        temperature=1.0, seed=seed, frequency_penalty=0.5, ignore_eos=True,
    )  # fmt: skip
    chooser = Sampler(resumed, Letters())
    for row in rows[start:]:
        resumed.push(chooser.choose(row))
    assert resumed.token_ids == whole.token_ids


def test_a_bias_makes_a_token_certain_or_impossible() -> None:
    assert sampler(logit_bias={2: 5.0}).choose(LOGITS) == 2
    assert sampler(logit_bias={EOS: -100.0}).choose(LOGITS) == 1
    assert sampler(logit_bias={10_000: 100.0}).choose(LOGITS) == EOS
    assert not Params(logit_bias={1: 1.0}).plain


@pytest.mark.parametrize(
    ("scores", "what"),
    [
        ([0.0, 1.0], "not list"),
        (np.zeros((1, 4)), r"not one of shape \[1, 4\] and type float64"),
        (np.zeros(4, dtype=bool), "type bool"),
    ],
)
def test_scores_of_another_type_are_the_generators_fault(scores: Any, what: str) -> None:
    with pytest.raises(TypeError, match=what):
        sampler().choose(scores)
