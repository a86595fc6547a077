"""Pages, refusals, chunks, shared beginnings, seeds and failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmserve
from llmserve.errors import IncompatibleError, OptionError
from llmserve.plugin import demo_model_path
from llmserve.runtime import Engine, Generation, PromptLookup, RequestError
from llmserve.testing import ByteTokenizer, generation
from llmserve.testing.tiny_models import make_model
from llmserve_iterative.generator import StepwiseGenerator

from .families import engine_of, expected, finish, same_as_alone

PAGE = 32


def make_engine(**settings: Any) -> Engine:
    return engine_of(make_model("gpt2"), **settings)


def test_a_request_without_free_pages_waits() -> None:
    engine = make_engine(cache_tokens=64)
    requests = [generation([n + 1] * 40, 20) for n in range(3)]
    for request in requests:
        engine.admit(request)
    engine.step()
    assert (engine.live, engine.waiting) == (1, 2)
    finish(engine)
    assert all(same_as_alone("gpt2", request) for request in requests)


def test_the_newest_is_requeued_when_the_cache_is_full_and_recomputed() -> None:
    engine = make_engine(cache_tokens=128)
    first, last = generation([1] * 20, 90), generation([2] * 20, 90)
    engine.admit(first)
    engine.admit(last)
    requeued = False
    while not first.done:
        engine.step()
        requeued |= (engine.live, engine.waiting) == (1, 1)
        assert len(first.token_ids) >= len(last.token_ids)
    assert requeued
    assert 0 < len(last.token_ids) < 90
    finish(engine)
    assert engine.tokens_computed > 2 * 109
    assert last.cached_tokens == 0, "what it finds again of its own is not what was there before"
    assert same_as_alone("gpt2", first)
    assert same_as_alone("gpt2", last)


def test_sampling_continues_where_a_request_was_requeued() -> None:
    def sample(cache_tokens: int) -> list[list[int]]:
        engine = make_engine(cache_tokens=cache_tokens)
        requests = [generation([n + 3] * 20, 90, temperature=1.3, seed=n) for n in range(3)]
        for request in requests:
            engine.admit(request)
        finish(engine)
        return [request.token_ids for request in requests]

    assert sample(128) == sample(512)


def test_a_request_that_never_fits_is_refused() -> None:
    engine = make_engine(cache_tokens=64)
    for one in (generation([1] * 60, 20, requested=True), generation([1] * 65, 20)):
        with pytest.raises(RequestError) as refused:
            engine.admit(one)
        assert refused.value.code == "context_length_exceeded"
    assert not engine.busy


def test_an_answer_without_a_length_has_what_the_cache_can_hold() -> None:
    engine = make_engine(cache_tokens=64)
    request = generation([1] * 60, 20)
    engine.admit(request)
    finish(engine)
    assert (len(request.token_ids), request.finish_reason) == (5, "length")


def test_a_long_prompt_does_not_stall_the_others() -> None:
    engine = make_engine(prefill_chunk=10)
    early, late = generation([5, 6], 40), generation(list(range(1, 91)), 4)
    engine.admit(early)
    engine.step()
    engine.admit(late)
    for _ in range(8):
        before = len(early.token_ids)
        engine.step()
        assert len(early.token_ids) == before + 1
        assert not late.token_ids
    engine.step()
    assert len(late.token_ids) == 1
    finish(engine)
    assert same_as_alone("gpt2", early)
    assert same_as_alone("gpt2", late)


def test_a_shared_beginning_is_computed_once() -> None:
    engine = make_engine()
    beginning = [(11 * i) % 90 for i in range(64)]
    first = generation([*beginning, 1, 2], 8)
    engine.admit(first)
    finish(engine)
    computed = engine.tokens_computed
    second = generation([*beginning, 3], 8)
    engine.admit(second)
    finish(engine)
    assert engine.tokens_computed - computed == 1 + 7
    assert same_as_alone("gpt2", second)
    assert (first.cached_tokens, second.cached_tokens) == (0, 64)


def test_dropping_frees_at_once() -> None:
    engine = make_engine(max_sequences=1)
    running, waiting = generation([1] * 20, 50), generation([2] * 20, 50)
    engine.admit(running)
    engine.admit(waiting)
    engine.step()
    assert engine.cache_used > 0
    engine.drop(waiting)
    engine.drop(running)
    assert (engine.live, engine.waiting, engine.cache_used) == (0, 0, 0)
    engine.drop(running)


def test_a_seed_gives_the_same_tokens_whatever_else_runs() -> None:
    def sample(others: int) -> list[int]:
        engine = make_engine()
        for n in range(others):
            engine.admit(generation([n + 3] * (n + 1), 30, temperature=1.3, seed=n))
            engine.step()
        request = generation([9, 8, 7], 24, temperature=1.2, top_p=0.9, seed=77)
        engine.admit(request)
        finish(engine)
        return request.token_ids

    alone = sample(0)
    assert alone == sample(1) == sample(3)
    assert alone != expected("gpt2", (9, 8, 7), 24)


def test_a_run_of_forced_tokens_takes_one_pass() -> None:
    """The tokens are those of a runner that accepts one at a time, in fewer steps, in any mix."""
    text = b"ab" * 40

    class Repeating:
        def __init__(self, generation: Generation) -> None:
            self._generation = generation

        def __call__(self, scores: Any) -> None:
            # Of every eight tokens, the first is free.
            if len(self._generation.token_ids) % 8:
                scores[np.arange(scores.size) != self.forced()[0]] = -np.inf

        def forced(self) -> list[int]:
            position = len(self._generation.token_ids)
            return [int(byte) % 50 for byte in text[position : position + -position % 8]]

    def sample(*, runs: bool, cache_tokens: int) -> tuple[list[list[int]], int]:
        engine = make_engine(cache_tokens=cache_tokens, accepts_runs=runs)
        requests = [generation([n + 3] * 20, 60, temperature=1.3, seed=n) for n in range(3)]
        for request in requests:
            request.constraint = Repeating(request)
            engine.admit(request)
        steps = 0
        while engine.busy:
            assert not engine.step().failed
            steps += 1
        assert engine.cache_used == 0
        return [request.token_ids for request in requests], steps

    expected_tokens, single_steps = sample(runs=False, cache_tokens=512)
    for cache_tokens in (512, 96):
        tokens, steps = sample(runs=True, cache_tokens=cache_tokens)
        assert tokens == expected_tokens
        assert steps < single_steps / 2 or cache_tokens == 96


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "falcon"])
def test_guesses_do_not_change_the_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a guess costs is measured, and depends on what else the machine does.
    monkeypatch.setattr("llmserve.runtime.engine.guessing.Price.of_guess", lambda *_: 0.2)
    engine = engine_of(make_model(family), guesser=PromptLookup(4))
    requests = []
    for start in ((5, 6, 7), (8, 9, 10)):
        answer = expected(family, start, 20)
        requests.append(generation([*start, *answer, *start], 20))
    for request in requests:
        engine.admit(request)
        engine.step()
    finish(engine)
    assert all(same_as_alone(family, request) for request in requests)
    # A padded runner computes several tokens of a sequence alone.
    assert (engine.guessed_tokens > 0) == (family != "falcon")


def test_a_draft_model_guesses_and_does_not_change_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmserve.runtime.engine.guessing.Price.of_guess", lambda *_: 0.2)
    answers = []
    many: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 7}]
    for draft in ("", str(demo_model_path())):
        built = llmserve.build(
            "iterative", "demo", output=tmp_path / f"m{not draft}", draft_model=draft
        )
        settings = built.manifest.components["generator"]["settings"]
        engine: Any = StepwiseGenerator(settings, built.folder / "1").stepper(ByteTokenizer())
        # The sampled ones as well: a guess stays if the sampler chooses it.
        requests = [generation([40, 50, 60], 24, decode=repr, **params) for params in many]
        for request in requests:
            engine.admit(request)
        finish(engine)
        answers.append([request.token_ids for request in requests])
    assert answers[0] == answers[1]
    assert 0 < engine.accepted_tokens <= engine.guessed_tokens
    with pytest.raises(OptionError, match="leave one of them out"):
        llmserve.build(
            "iterative", "demo", output=tmp_path / "both", draft_model=draft, prompt_lookup=3
        )


def test_a_request_that_fails_does_so_alone() -> None:
    engine = make_engine()
    good, bad = generation([1, 2, 3], 10), generation([4, 5, 6], 10)

    def fail() -> None:
        if len(bad.token_ids) == 3:
            raise RuntimeError("no listener")

    bad.on_text = fail
    engine.admit(good)
    engine.admit(bad)
    failed = []
    while engine.busy:
        failed += engine.step().failed
    ((failed_request, error),) = failed
    assert failed_request is bad
    assert str(error) == "no listener"
    assert same_as_alone("gpt2", good)
    assert engine.cache_used == 0


def test_a_model_without_a_cache_is_refused() -> None:
    import transformers

    config = transformers.OpenAIGPTConfig(vocab_size=50, n_embd=16, n_layer=1, n_head=2)
    model = transformers.OpenAIGPTLMHeadModel(config).eval()
    with pytest.raises(IncompatibleError, match="OpenAIGPTLMHeadModel cannot be decoded"):
        engine_of(model, cache_tokens=64)


def test_bfloat16_decodes() -> None:
    engine = engine_of(make_model("llama", torch.bfloat16))
    request = generation([5, 6, 7], 20)
    engine.admit(request)
    finish(engine)
    assert len(request.token_ids) == 20
