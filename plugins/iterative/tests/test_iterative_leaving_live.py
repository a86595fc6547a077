"""On a real Triton: clients that go, steps that take too long, and what is left of it all."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
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


def test_steps_that_take_longer_than_the_idle_time_lose_nobody(triton: LiveTriton) -> None:
    """Triton 2.51 never answers a request that is given back after its idle time."""
    model = build_slow(triton, "slow", max_batch_size=4, idle_seconds=0.3, burst_ms=0.0)

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
