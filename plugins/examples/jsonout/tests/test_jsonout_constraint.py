"""A generation held to JSON while its scores are nothing but chance."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.demo import demo_model_path
from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.runtime.hf_tokenizer import TransformersTokenizer
from llmserve.runtime.params import Params
from llmserve.runtime.sampling import Sampler
from llmserve_jsonout.constraint import JsonConstraint, Pieces

SIZE = 1024


@pytest.fixture(scope="module")
def tokenizer() -> TransformersTokenizer:
    return TransformersTokenizer({"path": "."}, demo_model_path())


@pytest.fixture(scope="module")
def pieces(tokenizer: TransformersTokenizer) -> Pieces:
    return Pieces(tokenizer.decode, tokenizer.encode("a")[-1], SIZE)


def held(tokenizer: TransformersTokenizer, length: int, **asked: object) -> Generation:
    return Generation(
        [5],
        Params(**asked),  # type: ignore[arg-type]
        max_tokens=length,
        eos_ids=tokenizer.eos_ids,
        decode=tokenizer.decode,
    )


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(3, 40),
    seed=st.integers(0, 2**32),
    liked=st.sampled_from(["{", "[", '"', "\\", ":", "-", "e", " ", "u", "t"]),
)
def test_any_scores_and_any_length_give_one_complete_object(
    tokenizer: TransformersTokenizer, pieces: Pieces, length: int, seed: int, liked: str
) -> None:
    """With a liking for characters that lead away from an end."""
    chance = np.random.default_rng(seed)
    generation = held(tokenizer, length, temperature=1.0, seed=seed)
    constraint, sampler = JsonConstraint(generation, pieces), Sampler(generation, tokenizer)
    bias = np.array([3.0 * (liked in text) for text in pieces.texts])
    while not generation.done:
        scores = chance.normal(size=SIZE) + bias
        constraint.mask(scores)
        token = sampler.choose(scores)
        constraint.take(token)
        generation.push(token)
    assert generation.finish_reason == "stop"
    assert isinstance(json.loads(generation.text), dict)


def test_a_piece_is_what_a_token_adds_to_a_text(
    tokenizer: TransformersTokenizer, pieces: Pieces
) -> None:
    text = 'a {"the capital": "Seoul"} is'
    ids = tokenizer.encode(text)
    assert "".join(pieces.texts[token] for token in ids) == text
    assert all(not pieces.texts[token] for token in tokenizer.eos_ids)


def test_half_a_character_is_no_piece(tokenizer: TransformersTokenizer, pieces: Pieces) -> None:
    ids = tokenizer.encode("東")
    assert len(ids) > 1
    assert not any("\ufffd" in pieces.texts[token] for token in ids)


def test_a_vocabulary_without_brackets_is_refused() -> None:
    with pytest.raises(RequestError, match="no token for"):
        Pieces(lambda ids: "".join(chr(97 + i) for i in ids), 0, 26)


@pytest.mark.parametrize(
    ("length", "asked", "message"),
    [
        (2, {}, "max_tokens of at least 3"),
        (9, {"min_tokens": 4}, "cannot go with min_tokens"),
        (9, {"bad_words": ("a",)}, "cannot go with bad_words"),
    ],
)
def test_what_could_break_the_promise_is_refused(
    tokenizer: TransformersTokenizer,
    pieces: Pieces,
    length: int,
    asked: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(RequestError, match=message):
        JsonConstraint(held(tokenizer, length, **asked), pieces)
