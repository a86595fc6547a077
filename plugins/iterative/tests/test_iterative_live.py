"""In-flight batching on a real Triton: joining requests, unusual clients, disconnects."""

from __future__ import annotations

import os
import queue
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from soak import Soak, figure
from transformers import AutoTokenizer
from tritonclient import grpc as triton_grpc

from llmserve.plugin import demo_model_path
from llmserve.testing import LiveTriton
from llmserve.testing.live import completion_order
from llmserve.testing.logprobs import check_logprobs
from llmserve.testing.tiny_models import make_model

pytestmark = pytest.mark.long

PROMPT = "Programming in C++ is like"


@pytest.fixture
def in_flight(triton: LiveTriton) -> str:
    return triton.build("iterative")


# The same options as in the conformance suite, so that both use the same models. Dynamic batches
# run as static ones do.
DRIVERS: list[dict[str, Any]] = [
    {},
    {"batching": "continuous", "max_batch_size": 8},
    {"batching": "static", "max_batch_size": 8},
]


@pytest.mark.parametrize("options", DRIVERS, ids=str)
def test_every_driver_returns_the_answers_of_generate(
    triton: LiveTriton, options: dict[str, Any]
) -> None:
    prompts = [PROMPT, "Once upon a time", "Hello", "The capital of France is"]
    hf, model = triton.build("hf"), triton.build("iterative", **options)
    expected = [triton.client.generate(hf, p, max_tokens=32).text for p in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = pool.map(lambda p: triton.client.generate(model, p, max_tokens=32).text, prompts)
        assert list(texts) == expected


TUTORIAL: dict[str, Any] = {"name": "iterative-gpt2", "stream": True, "burst_ms": 0.0}


def output_tokens(triton: LiveTriton, model: str) -> dict[str, float]:
    """Return how many tokens each process of a model reports to have generated."""
    with urllib.request.urlopen(triton.server.metrics_url, timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = [sample for family in families for sample in family.samples]
    return {
        labels["process"]: value
        for name, labels, value, *_ in samples
        if name == "llmserve_output_tokens_total" and labels["model"] == model
    }


# Not the model of tests whose clients leave: Triton keeps a process as long as it counts a request
# as running, which may be for ever if a client has left at a bad moment.
@pytest.mark.parametrize("options", [TUTORIAL, {"name": "outlived", "batching": "continuous"}])
def test_metrics_outlive_the_old_process(triton: LiveTriton, options: dict[str, Any]) -> None:
    """Triton drops a metric as soon as one of two processes that publish it releases it.

    The other process then writes into freed memory, which went well for a while.
    """
    model = triton.build("iterative", **options)
    (old_process,) = output_tokens(triton, model)
    config = triton.repository / model / "config.pbtxt"
    # Triton reloads only a changed model; the new process starts before the old one ends.
    os.utime(config, (time.time() + 2, time.time() + 2))
    triton.load(model)
    deadline = time.monotonic() + 60
    while old_process in output_tokens(triton, model):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    triton.client.generate(model, PROMPT, max_tokens=7, ignore_eos=True)
    # The answer may arrive before its metrics are published.
    while (counts := list(output_tokens(triton, model).values())) != [7]:
        assert time.monotonic() < deadline, counts
        time.sleep(0.1)


def test_a_request_joins_while_others_are_running(triton: LiveTriton, in_flight: str) -> None:
    # A fast engine can be done before a busy machine runs the second client. If no request can
    # join, the long one is first every time.
    tries = (completion_order(triton, in_flight, long=400, short=5) for _ in range(3))
    assert ["short", "long"] in tries


def run_tutorial_client(triton: LiveTriton, model: str) -> list[Any]:
    """Do what the client of the iterative scheduling tutorial does, with the same library."""
    incoming: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(triton.server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: incoming.put(error or result))
        text = triton_grpc.InferInput("text_input", [1, 1], "BYTES")
        text.set_data_from_numpy(np.array([[PROMPT.encode()]], dtype=np.object_))
        client.async_stream_infer(
            model,
            [text],
            request_id="0",
            parameters={"max_tokens": 12, "ignore_eos": False},
            enable_empty_final_response=True,
        )
        responses = [incoming.get(timeout=60)]
        while not isinstance(responses[-1], Exception):
            if responses[-1].get_response().parameters["triton_final_response"].bool_param:
                break
            responses.append(incoming.get(timeout=60))
        client.stop_stream()
    return responses


def test_the_tutorials_client_runs_unchanged(triton: LiveTriton) -> None:
    model = triton.build("iterative", **TUTORIAL)
    responses = run_tutorial_client(triton, model)
    texts = [response.as_numpy("text_output").reshape(-1)[0].decode() for response in responses]
    assert len(texts) > 5
    assert "".join(texts) == triton.client.generate(model, PROMPT, max_tokens=12).text


# Slots that Triton keeps for disconnected clients make it wait when it is stopped.
SHORT_IDLE_TIME: dict[str, Any] = {"idle_seconds": 5.0}


def wait_until_idle(triton: LiveTriton, model: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while figure(triton, model, "running_sequences"):
        assert time.monotonic() < deadline, "a sequence without a client is still running"
        time.sleep(0.05)
    assert figure(triton, model, "cache_used_tokens") == 0


def test_nothing_is_left_of_disconnected_clients_without_further_requests(
    triton: LiveTriton,
) -> None:
    model = triton.build("iterative", **SHORT_IDLE_TIME)
    for count in range(6):
        pieces = triton.client.stream(model, PROMPT, max_tokens=480, ignore_eos=True)
        for _ in range(count):
            next(pieces)
        pieces.close()
    wait_until_idle(triton, model, 5)


def test_a_soak_leaves_nothing_behind(triton: LiveTriton) -> None:
    """A short version of bench/soak.py; measuring memory needs the ten minutes."""
    model = triton.build("iterative", **SHORT_IDLE_TIME)
    report = Soak(triton, model, clients=12, max_tokens=120).run(4, every=2)
    assert not report.problems()
    last = report.samples[-1]
    assert min(last.answered, last.cancelled, last.refused) > 0


@pytest.mark.parametrize("options", [DRIVERS[0], DRIVERS[2]], ids=str)
def test_logprobs_are_those_of_the_models_logits(
    triton: LiveTriton, options: dict[str, Any]
) -> None:
    check_logprobs(triton, triton.build("iterative", **options))


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_a_hybrid_gives_the_answers_of_generate(
    triton: LiveTriton, tmp_path: Path, family: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    tokenizer.save_pretrained(tmp_path)
    make_model(family, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    prompts = [PROMPT, "Once upon a time", "Hello", "The capital of France is"]
    hf = triton.build("hf", str(tmp_path))
    # Prompts are read in pieces, and the cache is too small for all of them at once.
    model = triton.build("iterative", str(tmp_path), prefill_chunk=3, cache_tokens=128)
    expected = [triton.client.generate(hf, p, max_tokens=40).text for p in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = pool.map(lambda p: triton.client.generate(model, p, max_tokens=40).text, prompts)
        assert list(texts) == expected
