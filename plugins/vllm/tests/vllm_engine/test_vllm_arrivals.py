"""vLLM's engine in this process: requests that join, leave and come back change no answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.runtime import Adapters, Generation, Stepper, run_batch
from llmserve.testing import ByteTokenizer, generation

from .references import MAX_TOKENS, OPTIONS, PROMPTS, expected, save_tiny_llama, tiny_llama

pytest.importorskip("vllm", reason="only `make test-vllm` installs vLLM")

LIMIT = 2000
"""More steps than any of these mixes can need."""
arrivals = st.lists(
    st.tuples(
        st.sampled_from(PROMPTS),
        st.integers(1, MAX_TOKENS),
        st.integers(0, 6),
        st.one_of(st.none(), st.integers(0, 30)),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


# The longest sequence takes four pages, and one is vLLM's own: with four sequences, some are put
# back into the queue.
LITTLE_CACHE = {"block_size": 32, "num_gpu_blocks_override": 9, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        # Tests that run in this process afterwards may use all cores.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from llmserve_vllm.load import Model

        folder = save_tiny_llama(tmp_path_factory.mktemp("tiny"))
        settings = {
            "device": "cpu", "dtype": OPTIONS["dtype"],
            # Requests of one class come as they do without the policy.
            "engine_args": {
                "enforce_eager": True, "scheduling_policy": "priority", **LITTLE_CACHE,
            },
        }  # fmt: skip
        made = Model(settings, str(folder), {"trust_remote_code": False}, folder)
        yield made
        made.discard()


@pytest.fixture(scope="module")
def stepper(model: Any) -> Stepper:
    from llmserve_vllm.engine import VllmStepper

    return VllmStepper(model, ByteTokenizer(), Adapters(Path("adapters"), model.adapters, 1))


def test_those_that_vllm_puts_back_into_its_queue_have_the_same_answers(
    stepper: Stepper, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted, record = [], model.usage.record

    def recorded(scheduler_stats: Any, iteration_stats: Any, *rest: Any, **options: Any) -> None:
        record(scheduler_stats, iteration_stats, *rest, **options)
        if iteration_stats is not None:
            preempted.append(iteration_stats.num_preempted_reqs)

    monkeypatch.setattr(model.usage, "record", recorded)
    longest = sorted(PROMPTS, key=len)[-6:]
    asked = [generation(prompt, MAX_TOKENS) for prompt in longest]
    run_batch(stepper, asked)
    assert sum(preempted) > 0
    assert [one.token_ids for one in asked] == [expected(prompt) for prompt in longest]


def test_a_class_above_goes_first(stepper: Stepper) -> None:
    longest = sorted(PROMPTS, key=len)[-6:]
    low = [generation(prompt, MAX_TOKENS, priority_class=1001) for prompt in longest]
    for request in low:
        stepper.admit(request)
    for _ in range(3):
        stepper.step()
    high = generation(PROMPTS[0], MAX_TOKENS, priority_class=-1)
    stepper.admit(high)
    waiting = [request for request in low if not request.token_ids]
    assert waiting
    while not high.done:
        assert not stepper.step().failed
    assert not any(request.done for request in waiting)
    while stepper.busy:
        stepper.step()
    for request in [high, *low]:
        assert request.token_ids == expected(tuple(request.prompt_ids))


def test_the_log_probabilities_of_named_tokens_are_the_models(stepper: Stepper) -> None:
    prompt, named = PROMPTS[0], (5, 9, 3)
    asked = generation(prompt, 1, logprobs=0, scored=named)
    run_batch(stepper, [asked])
    with torch.inference_mode():
        scores = tiny_llama()(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    (found,) = asked.logprobs
    assert [top.token for top in found.top] == list(named)
    assert [top.value for top in found.top] == pytest.approx(
        [float(scores[token]) for token in named], abs=1e-4
    )


@settings(max_examples=30, deadline=None)
@given(requests=arrivals)
def test_any_mix(stepper: Stepper, requests: list[tuple[Any, int, int, int | None, bool]]) -> None:
    kept: list[Generation] = []
    leaving: list[tuple[int, Generation, bool]] = []
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        assert steps < LIMIT, "the engine does not finish"
        assert not stepper.step().failed
        for entry in [entry for entry in leaving if entry[0] <= steps]:
            leaving.remove(entry)
            _, leaves, comes_back = entry
            stepper.drop(leaves)
            if comes_back and not leaves.done:
                stepper.admit(leaves)

    for prompt, max_tokens, pause, stays, comes_back in requests:
        request = generation(prompt, max_tokens)
        stepper.admit(request)
        if stays is not None:
            leaving.append((steps + stays, request, comes_back))
        if stays is None or comes_back:
            kept.append(request)
        for _ in range(pause):
            step()
    while stepper.busy or leaving:
        step()
    for request in kept:
        assert request.token_ids == expected(tuple(request.prompt_ids))[: request.max_tokens]
    assert (stepper.busy, stepper.live, stepper.waiting, stepper.cache_used) == (False, 0, 0, 0)
