"""Every model family, with its runner: token for token the output of ``generate()``."""

from __future__ import annotations

import random

import pytest

from llmserve.runtime import Engine
from llmserve.testing import generation
from llmserve.testing.tiny_models import CONTEXT, FAMILIES, VOCAB, make_model
from llmserve_iterative.generator import exact_length
from llmserve_iterative.runner import FlatRunner, PaddedRunner, StatesRunner

from .families import engine_of, finish, same_as_alone

RUNNERS: dict[str, type] = {
    **dict.fromkeys(
        ("falcon", "falcon_alibi", "bloom", "deepseek_v3", "phimoe", "qwen2_moe"), PaddedRunner
    ),
    **dict.fromkeys(("bamba", "lfm2", "mamba", "mamba2", "qwen3_next"), StatesRunner),
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(family: str) -> Engine:
    return engine_of(make_model(family), max_sequences=6, prefill_chunk=8)


def test_its_runner(engine: Engine, family: str) -> None:
    assert type(engine._runner) is RUNNERS.get(family, FlatRunner)


def test_alone(engine: Engine, family: str) -> None:
    for prompt in ([5], [7, 8, 9], list(range(30, 60))):
        request = generation(prompt, 24)
        engine.admit(request)
        finish(engine)
        assert same_as_alone(family, request)


def test_together(engine: Engine, family: str) -> None:
    rng = random.Random(family)
    requests = [
        generation(
            [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))], rng.randrange(1, 40)
        )
        for _ in range(9)
    ]
    for request in requests:
        engine.admit(request)
        engine.step()
    finish(engine)
    assert all(same_as_alone(family, request) for request in requests)
    assert (engine.live, engine.waiting, engine.cache_used) == (0, 0, 0)


def test_a_context_ends_where_answers_would_depend_on_others() -> None:
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 40,
    }
    model = make_model("phi3", rope_parameters=longrope, original_max_position_embeddings=40)
    assert exact_length(model) == 40
    assert exact_length(make_model("phi3")) == CONTEXT
    # On a GPU it would end after a part, which the kernel there cannot attend within.
    assert exact_length(make_model("llama", attention_chunk_size=12)) == CONTEXT
