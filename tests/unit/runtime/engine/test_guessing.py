"""Guesses: the same tokens in fewer passes, and hardly any guess where they are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from llmserve.runtime import DraftModel, Engine, Generation, Guesser, PromptLookup
from llmserve.runtime.engine.guessing import Chance, Price
from llmserve.testing import ByteTokenizer
from llmserve.testing.fake import generation
from tests.recall import RecallRunner

PROMPTS = [[1, 2, 3], list(range(20)), [7, 8, 9, 7, 8]]


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let guesses pay as with a real model, where a row costs far less than a pass."""
    monkeypatch.setattr(Price, "of_guess", lambda *_: 0.2)


def answers(guesser: Guesser | None, **params: Any) -> tuple[list[list[int]], Engine, int]:
    runner = RecallRunner(200)
    engine = Engine(runner, ByteTokenizer(), max_sequences=4, guesser=guesser)
    requests = [generation(prompt, 60, **params) for prompt in PROMPTS]
    for request in requests:
        engine.admit(request)
    while engine.busy:
        assert not engine.step().failed
    return [request.token_ids for request in requests], engine, len(runner.passes)


@pytest.mark.parametrize(
    "params",
    [{}, {"repetition_penalty": 1.2}, {"temperature": 0.05, "seed": 3}, {"logprobs": 1}],
    ids=str,
)
@pytest.mark.usefixtures("cheap")
def test_a_draft_model_gives_the_same_tokens_in_fewer_passes(params: dict[str, Any]) -> None:
    expected, _, passes = answers(None, **params)
    found, engine, guessing_passes = answers(DraftModel(RecallRunner(200), 4), **params)
    assert found == expected
    # A draft model knows no penalties, and guesses the likeliest token.
    assert guessing_passes < passes * (0.5 if params in ({}, {"logprobs": 1}) else 1)
    assert 0 < engine.accepted_tokens <= engine.guessed_tokens


@pytest.mark.usefixtures("cheap")
def test_guesses_that_are_wrong_stop() -> None:
    expected, *_ = answers(None)
    found, engine, _ = answers(DraftModel(RecallRunner(200, noise=50), 4))
    assert found == expected
    assert engine.accepted_tokens < engine.guessed_tokens < 0.3 * sum(map(len, expected))


def test_lookup_finds_what_followed_last() -> None:
    lookup = PromptLookup(4)
    request = generation([1, 2, 3, 4, 5, 1, 2, 3, 9, 9, 1, 2, 3], 20)

    def guess(count: int) -> list[int]:
        return lookup.guess({request: count})[request]

    assert guess(3) == [9, 9, 1]
    request.push(4)
    assert guess(3) == [5, 1, 2]
    request.push(6)
    assert guess(3) == []
    for token in (2, 3, 4):
        request.push(token)
    assert guess(2) == [6, 2]
    # One that lost its pages, or was dropped and came back, is read anew.
    lookup.drop(request)
    assert guess(2) == [6, 2]
    repeated = generation([5, 7, 7, 7, 7], 9)
    assert lookup.guess({repeated: 3})[repeated] == [7, 7, 7]
    short = generation([1], 3)
    assert lookup.guess({short: 3})[short] == []


def test_a_draft_model_without_space_guesses_nothing_and_frees_what_it_held() -> None:
    draft = DraftModel(RecallRunner(4), 3)
    first, second = generation([1] * 9, 20), generation([2] * 9, 20)
    found = draft.guess({first: 2, second: 2})
    assert [len(found[request]) for request in (first, second)] == [2, 0]
    draft.drop(first)
    assert len(draft.guess({second: 3})[second]) == 3


def test_a_draft_guesses_nothing_beyond_its_context() -> None:
    runner = RecallRunner(200)
    draft = DraftModel(runner, 4, context_length=16)
    request = generation([1] * 12, 20)
    # Of four guesses, the draft itself computes three.
    assert len(draft.guess({request: 4})[request]) == 4
    request.push(1)
    assert len(draft.guess({request: 4})[request]) == 4
    request.push(1)
    assert draft.guess({request: 1})[request] == []
    assert max(chunk.stop for chunks in runner.passes for chunk in chunks) == 16


def test_the_price_of_a_guess_is_its_share_of_a_pass() -> None:
    price = Price()
    for rows in (4, 8, 12, 16) * 50:
        price.measured(rows, 0.010 + 0.001 * rows, guessing=0.0, depth=1)
    # With ten sequences, a row more takes a twentieth of the pass, which makes ten tokens.
    assert price.of_guess(10) == pytest.approx(1.25 * 0.5, rel=0.05)
    assert price.of_guess(1) == pytest.approx(1.25 / 11, rel=0.05)
    for _ in range(100):
        price.measured(10, 0.020, guessing=0.010, depth=1)
    assert price.of_guess(10) > 1


def test_as_many_guesses_as_are_likely_enough() -> None:
    chance = Chance()
    assert chance.depth(0.3, 8) == 1
    for _ in range(40):
        chance.checked(4, 4)
    assert chance.depth(0.3, 8) == 8
    for _ in range(20):
        chance.checked(4, 0)
    assert chance.depth(0.3, 8) == 0


@pytest.mark.usefixtures("cheap")
def test_no_guess_is_beyond_the_length_of_an_answer() -> None:
    runner = RecallRunner(200)
    draft = DraftModel(RecallRunner(200), 4)
    engine = Engine(runner, ByteTokenizer(), max_sequences=1, guesser=draft)
    request: Generation = generation([1, 2, 3], 6)
    engine.admit(request)
    while engine.busy:
        engine.step()
    # The last token of an answer is never computed.
    assert max(chunk.stop for chunks in runner.passes for chunk in chunks) == 3 + 6 - 1
    assert len(request.token_ids) == 6
