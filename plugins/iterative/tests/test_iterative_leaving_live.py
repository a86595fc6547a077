"""On a real Triton: clients that go, steps that take too long, and what is left of it all."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import Soak, figure
from tritonclient import grpc as triton_grpc

from llmserve.builder.build import build_spec
from llmserve.builder.plan import BuildSpec
from llmserve.client import Completion
from llmserve.registry import Plugin, Registry, find_plugins
from llmserve.testing import LiveTriton

from . import slow_steps

PROMPT = "Programming in C++ is like"
# Places that Triton keeps for clients that have gone make it wait when it is stopped.
PATIENT: dict[str, Any] = {"idle_seconds": 5.0}


def build_slow(triton: LiveTriton, name: str, **options: Any) -> str:
    theirs = Plugin("slow", "llmserve-iterative", "0", module=slow_steps)
    spec = BuildSpec(
        plugin="slow", model="demo", name=name, output=triton.repository, options=options
    )
    build_spec(spec, registry=Registry([*find_plugins(), theirs]))
    triton.server.load(name)
    return name


@pytest.mark.parametrize("slots", ["oldest", "direct"])
def test_steps_that_take_longer_than_the_idle_time_lose_nobody(
    triton: LiveTriton, slots: str
) -> None:
    """Triton 2.51 never answers a request that is given back after its idle time."""
    model = build_slow(
        triton, f"slow-{slots}", slots=slots, max_batch_size=4, idle_seconds=0.3, burst_ms=0.0
    )

    def ask(tokens: int) -> Completion:
        time.sleep(0.2 * tokens)
        return triton.client.generate(model, PROMPT, max_tokens=tokens, timeout=30)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, (1, 2, 3, 4)))
    assert [answer.output_tokens for answer in answers] == [1, 2, 3, 4]
    assert all(PROMPT.startswith(answer.text) for answer in answers)
    assert figure(triton, model, "running_sequences") == 0


def until_nothing_runs(triton: LiveTriton, model: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while figure(triton, model, "running_sequences"):
        assert time.monotonic() < deadline, "a sequence that nobody waits for is still there"
        time.sleep(0.05)
    assert figure(triton, model, "cache_used_tokens") == 0


@pytest.mark.parametrize("how", ["left", "cancelled"])
def test_nothing_is_left_of_clients_that_go_and_nobody_else_asks(
    triton: LiveTriton, how: str
) -> None:
    """No further request is needed to bring it to light."""
    model = triton.build("iterative", **PATIENT)
    for turn in range(6):
        asked: dict[str, Any] = {"max_tokens": 480, "ignore_eos": True}
        if how == "left":
            pieces = triton.client.stream(model, PROMPT, **asked)
            for _ in range(turn):
                next(pieces)
            pieces.close()
            continue
        with triton_grpc.InferenceServerClient(triton.server.grpc_url) as client:
            client.start_stream(callback=lambda result, error: None)
            text = triton_grpc.InferInput("text_input", [1, 1], "BYTES")
            text.set_data_from_numpy(_bytes(PROMPT))
            client.async_stream_infer(model, [text], parameters={**asked, "stream": True})
            time.sleep(0.03 * turn)
            client.stop_stream(cancel_requests=True)
    until_nothing_runs(triton, model, 5)


def _bytes(text: str) -> Any:
    import numpy as np

    return np.array([[text.encode()]], dtype=np.object_)


def test_a_soak_leaves_nothing_behind(triton: LiveTriton) -> None:
    """The ten minutes of bench/soak.py, in short; memory needs the long one."""
    report = Soak(triton, triton.build("iterative", **PATIENT), clients=12, longest=120).run(
        8, every=4
    )
    assert not report.problems()
    last = report.moments[-1]
    assert min(last.answered, last.cancelled, last.refused) > 0
    assert last.model_memory > 0


LONGEST = 40
PROMPTS = ("Once upon a time", "The capital of France is", "Hello", PROMPT, "A")


@pytest.fixture(scope="module")
def whole(triton: LiveTriton) -> dict[str, str]:
    """What each prompt gets alone."""
    model = triton.build("iterative", **PATIENT)
    return {prompt: _text(triton, model, prompt, LONGEST) for prompt in PROMPTS}


@settings(max_examples=4, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from(PROMPTS),
            st.integers(1, LONGEST),
            st.floats(0, 0.15),
            st.one_of(st.none(), st.integers(0, 5)),
        ),
        min_size=1,
        max_size=10,
    )
)
def test_any_mix_of_arrivals_lengths_and_cancellations(
    triton: LiveTriton,
    whole: dict[str, str],
    requests: list[tuple[str, int, float, int | None]],
) -> None:
    """Who stays gets the answer that it gets alone, and of who goes nothing is left."""
    model = triton.build("iterative", **PATIENT)

    def ask(request: tuple[str, int, float, int | None]) -> bool:
        prompt, tokens, pause, patience = request
        time.sleep(pause)
        if patience is None:
            answer = _text(triton, model, prompt, tokens)
            # The last character may have been cut in the middle.
            return whole[prompt].startswith(answer.rstrip("\ufffd"))
        pieces = triton.client.stream(model, prompt, max_tokens=tokens, ignore_eos=True)
        for count, _ in enumerate(pieces):
            if count >= patience:
                break
        pieces.close()
        return True

    with ThreadPoolExecutor(len(requests)) as pool:
        assert all(pool.map(ask, requests))
    until_nothing_runs(triton, model, 5)


def _text(triton: LiveTriton, model: str, prompt: str, tokens: int) -> str:
    answer = triton.client.generate(model, prompt, max_tokens=tokens, ignore_eos=True, timeout=60)
    assert answer.output_tokens == tokens
    return answer.text
