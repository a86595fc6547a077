"""Hybrids, recurrent models and experts answer as ``generate()`` does in any mix, also where states
are copied for prompts that begin alike, or for sequences that lost their place."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.runtime import Chunk, Generation
from llmserve.testing import generation
from llmserve.testing.needs import plan_needs, read_size
from llmserve.testing.tiny_models import VOCAB, make_model, with_cache_called
from llmserve_iterative.delta_rule import modules_with_steps, stepping_in_place
from llmserve_iterative.runner import StatesRunner, StoredPages, make_runner

from .families import engine_of, expected, finish

rng = random.Random(7)
SYSTEM = [rng.randrange(VOCAB) for _ in range(70)]
PROMPTS = [
    *([*SYSTEM[:length], *user] for length in (40, 66, 70) for user in ([1], [5, 6, 7], [9] * 10)),
    *([rng.randrange(VOCAB) for _ in range(length)] for length in (1, 2, 31, 33)),
]
MOST = 36
FAMILIES = ["qwen3_next", "lfm2", "mamba", "mamba2", "bamba"]
# Those that read several tokens after others at once; the others copy nothing.
COPIED = ["qwen3_next", "lfm2", "mamba2", "bamba"]
EXPERTS = ["qwen2_moe", "phimoe"]


def correct(family: str, request: Generation) -> bool:
    tokens = expected(family, tuple(request.prompt_ids), MOST)
    return request.token_ids == tokens[: request.max_tokens]


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERTS])
@settings(max_examples=8, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(
            st.sampled_from(PROMPTS),
            st.integers(1, MOST),
            st.integers(0, 6),
            st.one_of(st.none(), st.integers(0, 30)),
        ),
        min_size=1,
        max_size=10,
    ),
    max_sequences=st.integers(1, 6),
    cache_tokens=st.sampled_from([128, 192, 512]),
    prefill_chunk=st.sampled_from([1, 16, 64]),
    copies=st.sampled_from([1, 3, 100]),
)
def test_any_mix(
    family: str,
    arrivals: list[tuple[list[int], int, int, int | None]],
    max_sequences: int,
    cache_tokens: int,
    prefill_chunk: int,
    copies: int,
) -> None:
    engine = engine_of(
        make_model(family),
        max_sequences=max_sequences,
        cache_tokens=cache_tokens,
        prefill_chunk=prefill_chunk,
        copies=copies,
    )
    kept: list[Generation] = []
    cancelled: dict[Generation, int] = {}

    def step() -> None:
        assert not engine.step().failed
        for request in list(cancelled):
            cancelled[request] -= 1
            if cancelled[request] < 0:
                engine.drop(request)
                del cancelled[request]

    for prompt, length, pause, steps in arrivals:
        engine.admit(request := generation(prompt, length))
        if steps is None:
            kept.append(request)
        else:
            cancelled[request] = steps
        for _ in range(pause):
            step()
    while engine.busy:
        step()
    assert all(correct(family, request) for request in kept)
    assert (engine.live, engine.waiting, engine.cache_used) == (0, 0, 0)


@pytest.mark.parametrize("family", COPIED)
def test_a_shared_beginning_is_read_once(family: str) -> None:
    engine = engine_of(make_model(family), prefill_chunk=64)
    for user, found in (([1], 0), ([5, 6, 7], 64)):
        computed = engine.tokens_computed
        engine.admit(request := generation([*SYSTEM, *user], 8))
        finish(engine)
        assert correct(family, request)
        assert request.cached_tokens == found
        assert engine.tokens_computed - computed == len(request.prompt_ids) + 7 - found


@pytest.mark.parametrize("family", COPIED)
def test_a_sequence_that_lost_its_place_reads_less_again(family: str) -> None:
    computed = []
    for copies in (0, 100):
        engine = engine_of(make_model(family), cache_tokens=224, copies=copies)
        many = [generation(prompt, MOST) for prompt in (PROMPTS[2], PROMPTS[5], PROMPTS[8])]
        for request in many:
            engine.admit(request)
            engine.step()
        finish(engine)
        assert all(correct(family, request) for request in many)
        computed.append(engine.tokens_computed)
    assert computed[1] < computed[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_that_decode_are_one_batch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(family)
    engine = engine_of(model, max_sequences=5)
    assert type(engine._runner) is StatesRunner
    shapes: list[tuple[int, ...]] = []
    forward = model.forward

    def recorded(*, input_ids: torch.Tensor, **inputs: Any) -> Any:
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids=input_ids, **inputs)

    for n in range(5):
        engine.admit(generation([n + 3] * (n + 1), 20))
    engine.step()
    monkeypatch.setattr(model, "forward", recorded)
    for _ in range(4):
        engine.step()
    assert shapes == [(5, 1)] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_the_delta_rule_changes_its_state_where_it_is(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as family

    torch.manual_seed(1)
    sizes = {"query": (2, 8), "key": (2, 8), "value": (4, 16)}
    tokens = {name: torch.randn(3, 1, *size).to(dtype) for name, size in sizes.items()}
    rates = {"g": -torch.rand(3, 1, 4), "beta": torch.rand(3, 1, 4).to(dtype)}
    settings = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "cu_seqlens": None}
    state = torch.randn(3, 4, 8, 16)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = family.torch_recurrent_gated_delta_rule(
            **tokens, **rates, **settings, initial_state=state
        )
        return found

    expected, own = step(), family.torch_recurrent_gated_delta_rule
    with stepping_in_place(modules_with_steps(make_model("qwen3_next"))):
        found = step()
    torch.testing.assert_close(
        found, expected, atol=2e-5 if dtype is torch.float32 else 0.02, rtol=0
    )
    assert found[1] is state
    assert family.torch_recurrent_gated_delta_rule is own


def test_copies_take_no_more_memory_than_allowed() -> None:
    few, many = (make_runner(make_model("qwen3_next"), 128, size << 20) for size in (1, 8))
    assert isinstance(few, StatesRunner)
    assert isinstance(many, StatesRunner)
    assert few.most_copies == many.most_copies // 8 > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_of_memory_counts_what_is_allocated(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    model = make_model(family, dtype)
    model.save_pretrained(tmp_path)
    size = read_size(tmp_path)
    runner = make_runner(model, 64)
    assert isinstance(runner, StatesRunner)
    for number in range(3):
        runner.run([Chunk(SYSTEM[:40], 0, [0, 1], state=number)])
    states = [sum(part.nbytes for part in each.values()) for each in runner._states.values()]
    # What a convolution sees is kept in the type of the weights.
    assert (size.state if dtype is torch.float32 else size.state // 2) <= states[0] <= size.state
    assert states == [states[0]] * 3
    width = sum(part[0].numel() for layer in runner._store._layers.values() for part in layer)
    assert size.cache == width

    def cache_of(sequences: int, copies: int) -> int:
        options = {"device": "cpu", "dtype": "float32", "max_batch_size": sequences}
        needs = plan_needs("iterative", tmp_path, {**options, "state_mb": copies})
        assert needs.cached.endswith("states of 5 sequences with copies" if sequences == 5 else "")
        return needs.cache

    pages = 4 * size.cache * 128
    assert cache_of(5, 0) == pages + 5 * size.state
    assert 0 <= pages + 5 * size.state + 1_000_000 - cache_of(5, 1) < size.state
    assert cache_of(1, 0) == pages + size.state


def test_a_plan_counts_the_latent_that_is_kept(tmp_path: Path) -> None:
    model = make_model("deepseek_v3")
    model.save_pretrained(tmp_path)
    size = read_size(tmp_path)
    runner = make_runner(model, 128)
    assert isinstance(runner, StoredPages)
    runner.run([Chunk(SYSTEM[:40], 0, [0, 1, 2])])
    assert len(runner.read_page(0)) == size.cache * runner.page_size * 4
    assert size.of_heads == 2 * 4 * (8 + 8 + 4)


@pytest.mark.parametrize("family", ["llama", "lfm2", "mamba"])
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_model_may_call_its_cache_as_another_version_of_transformers_does(
    family: str, name: str
) -> None:
    model = with_cache_called(make_model(family), name)
    request = generation(PROMPTS[0], 8)
    engine = engine_of(model, max_sequences=1)
    engine.admit(request)
    finish(engine)
    assert request.token_ids == expected(family, tuple(PROMPTS[0]), 8)
