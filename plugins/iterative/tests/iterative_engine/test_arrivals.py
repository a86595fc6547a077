"""Random arrivals, lengths and cancellations: nobody's answer depends on anybody else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.runtime.generation import Generation
from llmserve.testing import ByteTokenizer
from llmserve_iterative.engine.engine import Engine
from tests.support import generation
from tests.tiny_models import VOCAB, make_model

from .families import expected, finish

chance = random.Random(3)
# A handful of prompts, some with a common beginning so that prefixes are shared; what
# generate() makes of each is worked out once.
PROMPTS = [
    *([chance.randrange(VOCAB) for _ in range(chance.randrange(1, 40))] for _ in range(12)),
    *([(3 * i) % VOCAB for i in range(length)] for length in (17, 18, 33, 50, 60)),
]
LONGEST = 40

arrivals = st.lists(
    st.tuples(
        st.sampled_from(PROMPTS),
        st.integers(1, LONGEST),
        st.integers(0, 6),
        st.one_of(st.none(), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "falcon"])
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
    engine = Engine(
        make_model(family),
        ByteTokenizer(),
        max_sequences=max_sequences,
        cache_tokens=cache_tokens,
        prefill_chunk=prefill_chunk,
    )
    kept, leaving = [], []
    for prompt, max_tokens, pause, patience in requests:
        one = generation(prompt, max_tokens)
        engine.admit(one)
        if patience is None:
            kept.append(one)
        else:
            leaving.append([patience, one])
        for _ in range(pause):
            _step(engine, leaving)
    while engine.busy:
        _step(engine, leaving)
    assert all(_right(family, one) for one in kept)
    assert (engine.live, engine.waiting, engine.cache_used) == (0, 0, 0)
    last = generation(PROMPTS[0], 3)
    engine.admit(last)
    finish(engine)
    assert _right(family, last)


def _right(family: str, one: Generation) -> bool:
    whole = expected(family, tuple(one.prompt_ids), LONGEST)
    return one.token_ids == whole[: one.max_tokens]


def _step(engine: Engine, leaving: list[list]) -> None:  # type: ignore[type-arg]
    """One step, and the impatient lose some patience; who has none left goes."""
    assert engine.cache_used <= engine.cache_tokens
    assert not engine.step().failed
    for entry in list(leaving):
        entry[0] -= 1
        if entry[0] < 0:
            engine.drop(entry[1])
            leaving.remove(entry)
