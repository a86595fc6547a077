"""The output of ``generate()`` for a prompt, and running an engine until it is idle."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

from llmserve.runtime import Engine, Generation, Guesser
from llmserve.testing import ByteTokenizer
from llmserve.testing.tiny_models import make_model
from llmserve_iterative.runner import StatesRunner, make_runner


def engine_of(
    model: Any,
    *,
    max_sequences: int = 4,
    cache_tokens: int = 512,
    prefill_chunk: int = 256,
    guesser: Guesser | None = None,
    accepts_runs: bool | None = None,
    copies: int | None = None,
) -> Engine:
    runner = make_runner(model, cache_tokens)
    if copies is not None and isinstance(runner, StatesRunner) and runner.most_copies:
        runner.most_copies = copies
    if accepts_runs is not None:
        runner.accepts_runs = accepts_runs
    return Engine(
        runner,
        ByteTokenizer(),
        max_sequences=max_sequences,
        prefill_chunk=prefill_chunk,
        guesser=guesser,
    )


@cache
def _reference(family: str) -> Any:
    return make_model(family)


@cache
def expected(family: str, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """Return the greedy tokens that ``generate()`` generates for a prompt alone."""
    model = _reference(family)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
        )
    return [int(token) for token in output[0, len(prompt) :]]


def finish(engine: Engine, limit: int = 2000) -> None:
    """Run an engine until no generation is left; none may fail."""
    while engine.busy:
        assert not engine.step().failed
        limit -= 1
        assert limit, "the engine does not finish"


def same_as_alone(family: str, generation: Generation) -> bool:
    """Whether a finished generation has the tokens of ``generate()`` for its prompt."""
    return generation.token_ids == expected(
        family, tuple(generation.prompt_ids), generation.max_tokens
    )
