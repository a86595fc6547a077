"""Tests of the runner under the engine: no server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.plugin import demo_model_path
from llmserve.runtime import Chunk, Generation, Params, TransformersTokenizer
from llmserve.scaffold.runner import generator

TOKENIZER = TransformersTokenizer({"path": "."}, demo_model_path())
SETTINGS = {"vocab_size": 1024, "eos_ids": [0], "context_length": 512}
PROMPTS = ("Once upon a time", "Once upon a time there was", "The capital of France is", "Hello")


def generation(prompt: str, max_tokens: int = 12, **params: Any) -> Generation:
    return Generation(
        TOKENIZER.encode(prompt),
        Params(**params),
        max_tokens=max_tokens,
        eos_ids=frozenset(),
        decode=TOKENIZER.decode,
    )


def answers(*requests: Generation, steps_between: int = 0) -> list[list[int]]:
    engine = generator.ScaffoldGenerator(SETTINGS, Path()).stepper(TOKENIZER)
    for request in requests:
        engine.admit(request)
        for _ in range(steps_between):
            assert not engine.step().failed
    while engine.busy:
        assert not engine.step().failed
    return [request.token_ids for request in requests]


def test_a_pass_in_pieces_has_the_scores_of_a_whole_one() -> None:
    ids, pages = list(range(1, 41)), [3, 0, 2]
    whole = generator.RecurrentRunner(1024).run([Chunk(ids, 0, pages, len(ids))])
    runner = generator.RecurrentRunner(1024)
    runner.run([Chunk(ids[:17], 0, pages, 0)])
    last = runner.run([Chunk(ids[17:], 17, pages)])
    np.testing.assert_allclose(last.row(0), whole.row(39), rtol=1e-4, atol=1e-4)


def test_a_copy_is_what_the_state_was() -> None:
    ids, pages = list(range(1, 41)), [3, 0, 2]
    runner = generator.RecurrentRunner(1024)
    whole = runner.run([Chunk(ids, 0, pages, state=0)])
    runner.run([Chunk(ids[:32], 0, pages, 0, state=1)])
    runner.copy(1, 2)
    runner.run([Chunk([9, 9], 32, pages, state=1)])
    last = runner.run([Chunk(ids[32:], 32, pages, state=2)])
    np.testing.assert_allclose(last.row(0), whole.row(0), rtol=1e-4, atol=1e-4)


def test_a_shared_beginning_is_read_once() -> None:
    engine = generator.ScaffoldGenerator(SETTINGS, Path()).stepper(TOKENIZER)
    beginning = "Once upon a time there was a fox who lived in a wood near the sea. " * 3
    cached = []
    for ending in ("One day", "At night", "At noon"):
        engine.admit(request := generation(beginning + ending))
        while engine.busy:
            assert not engine.step().failed
        assert request.token_ids == answers(generation(beginning + ending))[0]
        cached.append(request.cached_tokens)
    assert cached[0] == 0
    assert cached[2]


@pytest.mark.parametrize("steps_between", [0, 1, 5])
def test_an_answer_does_not_depend_on_others(steps_between: int) -> None:
    alone = [answers(generation(prompt))[0] for prompt in PROMPTS]
    together = answers(*map(generation, PROMPTS), steps_between=steps_between)
    assert together == alone


def test_a_seed_gives_the_same_tokens() -> None:
    one, same, other = (
        answers(generation(PROMPTS[0], temperature=20.0, seed=seed))[0] for seed in (1, 1, 2)
    )
    assert one == same != other
