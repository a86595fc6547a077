"""In-flight batching on a real Triton: who joins whom, what clients send, what is left."""

from __future__ import annotations

import os
import queue
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from soak import Soak, figure
from tritonclient import grpc as triton_grpc

from llmserve.testing import LiveTriton
from tests.logprobs import check_logprobs
from tests.support import order_of_ends

PROMPT = "Programming in C++ is like"


@pytest.fixture
def in_flight(triton: LiveTriton) -> str:
    return triton.build("iterative")


# As the conformance suite builds them, so that both ask the same models.
DRIVERS: list[dict[str, Any]] = [
    {},
    {"batching": "continuous", "max_batch_size": 8},
    {"batching": "static", "max_batch_size": 8},
    {"batching": "dynamic"},
]


@pytest.mark.parametrize("options", DRIVERS, ids=str)
def test_behind_every_driver_it_gives_the_answers_of_generate(
    triton: LiveTriton, options: dict[str, Any]
) -> None:
    prompts = [PROMPT, "Once upon a time", "Hello", "The capital of France is"]
    hf, model = triton.build("hf"), triton.build("iterative", **options)
    expected = [triton.client.generate(hf, p, max_tokens=32).text for p in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = pool.map(lambda p: triton.client.generate(model, p, max_tokens=32).text, prompts)
        assert list(found) == expected


TUTORIAL: dict[str, Any] = {"name": "iterative-gpt2", "stream": True, "burst_ms": 0.0}


def tokens_told(triton: LiveTriton, model: str) -> dict[str, float]:
    """Return how many tokens each process of a model says it has made."""
    with urllib.request.urlopen(triton.server.metrics_url, timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    return {
        labels["process"]: value
        for name, labels, value, *_ in samples
        if name == "llmserve_output_tokens_total" and labels["model"] == model
    }


@pytest.mark.parametrize("options", [TUTORIAL, {"batching": "continuous"}])
def test_figures_outlive_the_process_before(triton: LiveTriton, options: dict[str, Any]) -> None:
    """Triton forgets a figure as soon as one of two processes that tell it lets go of it.

    The other goes on writing to it, into freed memory: for a while that went well.
    """
    model = triton.build("iterative", **options)
    (before,) = tokens_told(triton, model)
    config = triton.repository / model / "config.pbtxt"
    # Without a change it would stay as it is; the new one comes before the old one goes.
    os.utime(config, (time.time() + 2, time.time() + 2))
    triton.server.load(model)
    deadline = time.monotonic() + 60
    while before in tokens_told(triton, model):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    triton.client.generate(model, PROMPT, max_tokens=7, ignore_eos=True)
    # The answer may be here before its figures are there.
    while (told := list(tokens_told(triton, model).values())) != [7]:
        assert time.monotonic() < deadline, told
        time.sleep(0.1)


def test_a_request_joins_while_others_are_under_way(triton: LiveTriton, in_flight: str) -> None:
    # A fast engine can be done before a busy machine runs the second client; one that lets
    # nobody join is first every time.
    tries = (order_of_ends(triton, in_flight, long=400, short=5) for _ in range(3))
    assert ["short", "long"] in tries


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
    model = triton.build("iterative", **TUTORIAL)
    answers = ask_as_the_tutorial(triton, model)
    texts = [answer.as_numpy("text_output").reshape(-1)[0].decode() for answer in answers]
    assert len(texts) > 5
    assert "".join(texts) == triton.client.generate(model, PROMPT, max_tokens=12).text


# Places that Triton keeps for clients that have gone make it wait when it is stopped.
PATIENT: dict[str, Any] = {"idle_seconds": 5.0}


def until_nothing_runs(triton: LiveTriton, model: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while figure(triton, model, "running_sequences"):
        assert time.monotonic() < deadline, "a sequence that nobody waits for is still there"
        time.sleep(0.05)
    assert figure(triton, model, "cache_used_tokens") == 0


def test_nothing_is_left_of_clients_that_go_and_nobody_else_asks(triton: LiveTriton) -> None:
    """No further request is needed to bring it to light."""
    model = triton.build("iterative", **PATIENT)
    for turn in range(6):
        pieces = triton.client.stream(model, PROMPT, max_tokens=480, ignore_eos=True)
        for _ in range(turn):
            next(pieces)
        pieces.close()
    until_nothing_runs(triton, model, 5)


def test_a_soak_leaves_nothing_behind(triton: LiveTriton) -> None:
    """The ten minutes of bench/soak.py, in short; memory needs the long one."""
    report = Soak(triton, triton.build("iterative", **PATIENT), clients=12, longest=120).run(
        8, every=4
    )
    assert not report.problems()
    last = report.moments[-1]
    assert min(last.answered, last.cancelled, last.refused) > 0
    assert last.model_memory > 0


@pytest.mark.parametrize("options", [DRIVERS[0], DRIVERS[2]], ids=str)
def test_logprobs_are_those_of_the_models_logits(
    triton: LiveTriton, options: dict[str, Any]
) -> None:
    check_logprobs(triton, triton.build("iterative", **options))
