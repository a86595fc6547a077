"""A generation held to JSON while its scores are nothing but chance."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.runtime import Generation, Params, RequestError, Sampler, TransformersTokenizer
from llmserve.testing import ByteTokenizer, demo_model_path
from llmserve_jsonout.constraint import JsonConstraint, Pieces

SIZE = 1024


@pytest.fixture(scope="module")
def tokenizer() -> TransformersTokenizer:
    return TransformersTokenizer({"path": "."}, demo_model_path())


@pytest.fixture(scope="module")
def pieces(tokenizer: TransformersTokenizer) -> Pieces:
    return Pieces(tokenizer)


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
    generation.constraint = JsonConstraint(generation, pieces)
    sampler = Sampler(generation, tokenizer)
    bias = np.array([3.0 * (liked in pieces.text(token)) for token in range(SIZE)])
    while not generation.done:
        generation.push(sampler.choose(chance.normal(size=SIZE) + bias))
    assert generation.finish_reason == "stop"
    assert isinstance(json.loads(generation.text), dict)


def test_a_piece_is_what_a_token_adds_to_a_text(
    tokenizer: TransformersTokenizer, pieces: Pieces
) -> None:
    text = 'a {"the capital": "Seoul"} is'
    ids = tokenizer.encode(text)
    assert "".join(pieces.text(token) for token in ids) == text
    assert not any(pieces.text(token) for token in tokenizer.eos_ids)


def test_half_a_character_is_no_piece(tokenizer: TransformersTokenizer, pieces: Pieces) -> None:
    ids = tokenizer.encode("東")
    assert len(ids) > 1
    assert not any("\ufffd" in pieces.text(token) for token in ids)


class Letters(ByteTokenizer):
    """It has letters and digits, and half a character for all else."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) if chr(i).isalnum() else "\ufffd" for i in ids)


def test_a_vocabulary_without_brackets_is_refused() -> None:
    with pytest.raises(RequestError, match=r'no token for \{ \} \[ \] " :$'):
        Pieces(Letters())


def test_a_generation_that_was_interrupted_goes_on_where_it_was(
    tokenizer: TransformersTokenizer, pieces: Pieces
) -> None:
    """What it has written is read from the generation, so a new sampler changes nothing."""
    texts = []
    for pause in (None, 5):
        generation = held(tokenizer, 20, temperature=1.0, seed=3)
        generation.constraint = JsonConstraint(generation, pieces)
        chance = np.random.default_rng(1)
        sampler = Sampler(generation, tokenizer)
        while not generation.done:
            if len(generation.token_ids) == pause:
                sampler = Sampler(generation, tokenizer)
                generation.constraint = JsonConstraint(generation, pieces)
            generation.push(sampler.choose(chance.normal(size=SIZE)))
        texts.append(generation.text)
    assert texts[0] == texts[1]
    assert isinstance(json.loads(texts[0]), dict)


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
