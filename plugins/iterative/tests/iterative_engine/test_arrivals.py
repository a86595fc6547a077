"""Random arrivals, lengths and cancellations: no answer depends on another request."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.runtime import Engine, Generation
from llmserve.testing import generation
from llmserve.testing.tiny_models import VOCAB, make_model

from .families import engine_of, expected, finish

rng = random.Random(3)
# Only a few prompts, because the output of generate() is computed once for each; some begin
# alike, so that prefixes are shared.
PROMPTS = [
    *([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(12)),
    *([(3 * i) % VOCAB for i in range(length)] for length in (17, 18, 33, 50, 60)),
]
MAX_TOKENS = 40

arrivals = st.lists(
    st.tuples(
        st.sampled_from(PROMPTS),
        st.integers(1, MAX_TOKENS),
        st.integers(0, 6),
        st.one_of(st.none(), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "falcon", "qwen3_next"])
@settings(max_examples=8, deadline=None)
@given(
    requests=arrivals,
    max_sequences=st.integers(1, 6),
    cache_tokens=st.sampled_from([128, 192, 416]),
    prefill_chunk=st.sampled_from([1, 5, 16, 64]),
)
def test_any_mix(
    family: str,
    requests: list[tuple[list[int], int, int, int | None]],
    max_sequences: int,
    cache_tokens: int,
    prefill_chunk: int,
) -> None:
    engine = engine_of(
        make_model(family),
        max_sequences=max_sequences,
        cache_tokens=cache_tokens,
        prefill_chunk=prefill_chunk,
    )
    kept, cancelled = [], []
    for prompt, max_tokens, pause, steps_left in requests:
        request = generation(prompt, max_tokens)
        engine.admit(request)
        if steps_left is None:
            kept.append(request)
        else:
            cancelled.append([steps_left, request])
        for _ in range(pause):
            _step(engine, cancelled)
    while engine.busy:
        _step(engine, cancelled)
    assert all(_is_correct(family, request) for request in kept)
    assert (engine.live, engine.waiting, engine.cache_used) == (0, 0, 0)
    last = generation(PROMPTS[0], 3)
    engine.admit(last)
    finish(engine)
    assert _is_correct(family, last)


def _is_correct(family: str, request: Generation) -> bool:
    tokens = expected(family, tuple(request.prompt_ids), MAX_TOKENS)
    return request.token_ids == tokens[: request.max_tokens]


def _step(engine: Engine, cancelled: list[list]) -> None:  # type: ignore[type-arg]
    """Run a step, and drop each cancelled generation that has no steps left."""
    assert engine.cache_used <= engine.cache_tokens
    assert not engine.step().failed
    for entry in list(cancelled):
        entry[0] -= 1
        if entry[0] < 0:
            engine.drop(entry[1])
            cancelled.remove(entry)
