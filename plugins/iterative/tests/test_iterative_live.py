"""In-flight batching on a real Triton: who joins whom, what clients send, what is left."""

from __future__ import annotations

import queue
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as triton_grpc

from llmserve.testing import LiveTriton

PROMPT = "Programming in C++ is like"
LONG, SHORT = 400, 5


@pytest.fixture
def in_flight(triton: LiveTriton) -> str:
    return triton.build("iterative")


@pytest.fixture
def static(triton: LiveTriton) -> str:
    return triton.build("iterative", batching="static", max_batch_size=8)


def order_of_ends(triton: LiveTriton, model: str) -> list[str]:
    """Ask for a long answer and, once it is under way, for a short one."""
    ends: list[str] = []

    def ask(name: str, tokens: int, began: Callable[[], object] = lambda: None) -> None:
        for _ in triton.client.stream(model, PROMPT, max_tokens=tokens, ignore_eos=True):
            began()
        ends.append(name)

    with ThreadPoolExecutor(2) as pool:
        first: queue.Queue[None] = queue.Queue()
        long = pool.submit(ask, "long", LONG, lambda: first.put(None))
        first.get(timeout=60)
        pool.submit(ask, "short", SHORT).result()
        long.result()
    return ends


def test_a_request_joins_while_others_are_under_way(triton: LiveTriton, in_flight: str) -> None:
    assert order_of_ends(triton, in_flight) == ["short", "long"]


def test_in_static_batches_it_waits(triton: LiveTriton, static: str) -> None:
    assert order_of_ends(triton, static) == ["long", "short"]


def test_greedy_answers_are_those_of_generate(
    triton: LiveTriton, in_flight: str, static: str
) -> None:
    hf = triton.build("hf")
    for prompt in (PROMPT, "Once upon a time", "Hello", "The capital of France is"):
        expected = triton.client.generate(hf, prompt, max_tokens=48)
        for model in (in_flight, static):
            assert triton.client.generate(model, prompt, max_tokens=48) == expected


@pytest.mark.parametrize(
    "controls",
    [
        {"sequence_id": 2**40, "sequence_start": True},
        {"sequence_id": 3, "sequence_start": True, "sequence_end": True},
        {"sequence_id": "mine", "sequence_start": True},
    ],
    ids=["number", "end", "text"],
)
def test_a_sequence_id_of_the_clients_own_is_refused_with_the_reason(
    triton: LiveTriton, controls: dict[str, Any]
) -> None:
    model = triton.build("iterative")
    answers = ask_as_the_tutorial(triton, model, **controls)
    assert any("without a sequence id" in str(answer) for answer in answers)
    assert triton.client.generate(model, PROMPT, max_tokens=3).output_tokens == 3


def ask_as_the_tutorial(triton: LiveTriton, model: str, **asked: Any) -> list[Any]:
    """Do what the client of the iterative scheduling tutorial does, on its library."""
    answers: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(triton.server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        text = triton_grpc.InferInput("text_input", [1, 1], "BYTES")
        text.set_data_from_numpy(np.array([[PROMPT.encode()]], dtype=np.object_))
        client.async_stream_infer(
            model,
            [text],
            request_id="0",
            parameters={"max_tokens": 12, "ignore_eos": False},
            enable_empty_final_response=True,
            **asked,
        )
        found = [answers.get(timeout=60)]
        while not isinstance(found[-1], Exception):
            if found[-1].get_response().parameters["triton_final_response"].bool_param:
                break
            found.append(answers.get(timeout=60))
        client.stop_stream()
    return found


def test_the_tutorials_client_runs_unchanged(triton: LiveTriton) -> None:
    model = triton.build("iterative", name="iterative-gpt2", stream=True, burst_ms=0.0)
    answers = ask_as_the_tutorial(triton, model)
    texts = [answer.as_numpy("text_output").reshape(-1)[0].decode() for answer in answers]
    assert len(texts) > 5
    assert "".join(texts) == triton.client.generate(model, PROMPT, max_tokens=12).text


def figures(triton: LiveTriton, model: str) -> dict[str, float]:
    with urllib.request.urlopen(triton.server.metrics_url) as answer:
        lines = answer.read().decode().splitlines()
    return {
        line.split("{")[0].removeprefix("llmserve_"): float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("llmserve_") and f'"{model}"' in line
    }


def test_many_clients_that_leave_hold_nobody_up(triton: LiveTriton) -> None:
    """Triton keeps the place of a cancelled sequence for a while, so there must be others."""
    model = triton.build("iterative", max_batch_size=2, idle_seconds=5.0)
    for _ in range(12):
        for _ in triton.client.stream(model, PROMPT, max_tokens=LONG, ignore_eos=True):
            break
    answer = triton.client.generate(model, PROMPT, max_tokens=3, timeout=8)
    assert answer.output_tokens == 3


def test_figures_are_right_while_many_ask_and_look(triton: LiveTriton) -> None:
    """Several threads of the model's process tell figures; an unguarded one would crash it."""
    model = triton.build("iterative", name="measured")
    before = figures(triton, model)
    lengths = [1 + number % 7 for number in range(60)]

    def ask(tokens: int) -> int:
        figures(triton, model)
        time.sleep(0.3 * (tokens % 3))
        answer = triton.client.generate(model, PROMPT, max_tokens=tokens, ignore_eos=True)
        return answer.input_tokens or 0

    with ThreadPoolExecutor(12) as pool:
        prompts = list(pool.map(ask, lengths))
    expected = {
        "output_tokens_total": sum(lengths),
        "input_tokens_total": sum(prompts),
        "first_token_seconds_count": len(lengths),
    }
    # They are handed over one after the other, and may be looked at in between.
    deadline, now = time.monotonic() + 10, figures(triton, model)
    while {name: now[name] - before[name] for name in expected} != expected:
        assert time.monotonic() < deadline, now
        now = figures(triton, model)
    assert now["running_sequences"] == now["waiting_sequences"] == now["cache_used_tokens"] == 0
