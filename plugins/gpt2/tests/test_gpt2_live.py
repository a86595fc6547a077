"""Tests of sequences on a real Triton: their state is kept, separate, and freed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from llmserve.client.exchange import Steps
from llmserve.errors import ClientError, ContextLengthError, RequestRejectedError
from llmserve.plugin import check_repository
from llmserve.testing import LiveTriton, read_config
from llmserve.testing.client import client_error
from llmserve.testing.command import LLMSERVE
from llmserve.testing.one_layer import one_layer

pytestmark = pytest.mark.long

PROMPTS = [
    "I have lived in London",
    "I have lived in Paris",
    "I have lived in Berlin",
    "I have lived in Seoul",
    "Once upon a time",
    "A",
    "Programming in C++ is like",
    "The capital of France is",
]
TOKENS = 24
# The processes around the graph start in a tenth of the time if none of them loads torch.
LIGHT: dict[str, Any] = {"tokenizer": "tokenizers"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_layer(tmp_path_factory.getbasetemp() / "one-layer")


@pytest.fixture(params=["onnx", "torchscript"])
def model(request: pytest.FixtureRequest, triton: LiveTriton, small: Path) -> str:
    """Return a model of each format and kind of batching; the conformance suite uses both too."""
    options = {"batching": "sequence-oldest", **LIGHT} if request.param == "torchscript" else {}
    return triton.build(f"gpt2-{request.param}", str(small), **options)


@pytest.fixture
def idling(triton: LiveTriton, small: Path) -> str:
    """Return a model with a short idle timeout for sequences."""
    options = {"idle_seconds": 5.0, "max_batch_size": 2, **LIGHT}
    return triton.build("gpt2-torchscript", str(small), **options)


@pytest.fixture
def expected(triton: LiveTriton, small: Path) -> dict[str, str]:
    """Return the answers of generate(), one prompt at a time."""
    hf = triton.build("hf", str(small))
    return {
        prompt: triton.client.generate(hf, prompt, max_tokens=TOKENS, ignore_eos=True).text
        for prompt in PROMPTS
    }


@pytest.mark.parametrize("count", [1, 16])
def test_sequences_at_random_answer_as_generate_does(
    triton: LiveTriton, model: str, expected: dict[str, str], count: int
) -> None:
    def ask(seed: int) -> tuple[str, str]:
        rng = random.Random(seed)
        prompt = PROMPTS[seed % len(PROMPTS)]
        text, reason = "", None
        with triton.client.sequence(model) as steps:
            options: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
            while reason is None:
                piece = steps.send("" if text else prompt, step_tokens=rng.randint(1, 9), **options)
                text, reason, options = text + piece.text, piece.finish_reason, {}
                if rng.random() < 0.2:
                    time.sleep(rng.random() / 50)
        return prompt, text

    with ThreadPoolExecutor(count) as pool:
        for prompt, text in pool.map(ask, range(count)):
            assert text == expected[prompt]


def send(triton: LiveTriton, model: str, request: Any) -> Any:
    """Send a request without the client, which would not create such a request."""
    with grpc.insecure_channel(triton.server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            return stub.ModelInfer(request, timeout=60)
        except grpc.RpcError as error:
            raise client_error(error.details(), error.code().name, model=model) from None


def test_a_sequence_without_start_and_after_its_end(
    triton: LiveTriton, model: str, expected: dict[str, str]
) -> None:
    info = triton.client.model(model)
    with triton.client.sequence(model) as other:
        text = other.send(PROMPTS[0], max_tokens=TOKENS, ignore_eos=True, step_tokens=4).text
        steps = Steps(info)
        start = steps.step("Hello", {"max_tokens": 8})
        without_start = Steps(info).step("", {})
        del without_start.parameters["sequence_start"]
        with pytest.raises(RequestRejectedError, match="START"):
            send(triton, model, without_start)
        send(triton, model, start)
        (end,) = steps.end_requests()
        send(triton, model, end)
        with pytest.raises(RequestRejectedError, match="START"):
            send(triton, model, steps.step("", {}))
        while len(text) < len(expected[PROMPTS[0]]):
            text += other.send(step_tokens=4).text
    assert text == expected[PROMPTS[0]]


def test_a_sequence_that_was_idle_too_long_is_refused(
    triton: LiveTriton, idling: str, expected: dict[str, str]
) -> None:
    with triton.client.sequence(idling) as idle, triton.client.sequence(idling) as busy:
        idle.send("Hello", max_tokens=8)
        text = busy.send(PROMPTS[0], max_tokens=TOKENS, ignore_eos=True).text
        deadline = time.monotonic() + 7.0
        while time.monotonic() < deadline:
            if len(text) < len(expected[PROMPTS[0]]):
                text += busy.send().text
            else:
                busy.send()
            time.sleep(0.2)
        with pytest.raises(ClientError, match=r"START|no sequence"):
            idle.send()
        while len(text) < len(expected[PROMPTS[0]]):
            text += busy.send().text
    assert text == expected[PROMPTS[0]]


def test_slots_of_lost_clients_are_freed(triton: LiveTriton, idling: str) -> None:
    info = triton.client.model(idling)
    with ThreadPoolExecutor(6) as pool:
        lost = [Steps(info).step("Hello", {"max_tokens": 8}) for _ in range(6)]
        list(pool.map(lambda request: send(triton, idling, request), lost))
    assert triton.client.generate(idling, "Hello", max_tokens=4, timeout=60).output_tokens == 4


def test_batches_form_in_the_generator(triton: LiveTriton, small: Path) -> None:
    name = triton.build("gpt2-onnx", str(small))
    generator = f"{name}_generator"

    def requests_per_execution() -> float:
        before = triton.requests(generator), triton.executions(generator)
        with ThreadPoolExecutor(4) as pool:
            options = {"max_tokens": 64, "ignore_eos": True}
            list(pool.map(lambda p: triton.client.generate(name, p, **options), PROMPTS[:4]))
        requests = triton.requests(generator) - before[0]
        return requests / (triton.executions(generator) - before[1])

    # On a machine that stalls, the requests may miss each other once, but not every time.
    assert any(requests_per_execution() > 1.5 for _ in range(4))


def test_the_emitted_client_and_the_command_line(triton: LiveTriton, small: Path) -> None:
    name = triton.build("gpt2-onnx", str(small))
    prompt = "The capital of France is"
    whole = triton.client.generate(name, prompt, max_tokens=12).text
    client = triton.repository / name / "client.py"
    for command in (
        [sys.executable, str(client), prompt],
        [*LLMSERVE, "query", name, prompt],
    ):
        run = subprocess.run(
            [*command, "--url", triton.server.grpc_url, "--max-tokens", "12"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (run.stdout, run.returncode) == (f"{whole}\n", 0), run.stderr


def test_a_prompt_far_over_the_context_is_not_encoded(triton: LiveTriton, model: str) -> None:
    # That would take a second per megabyte, and every other request of the model would wait.
    with pytest.raises(ContextLengthError):
        triton.client.generate(model, "x" * 300_000)


def test_the_repository_passes_the_check(triton: LiveTriton, model: str) -> None:
    ours = {model, *(f"{model}_{part}" for part in ("preprocess", "session", "generator"))}
    assert [p for p in check_repository(triton.repository) if p.where in ours] == []
    config = read_config(triton.repository / f"{model}_generator")
    assert (config.backend, config.platform) in {("onnxruntime", ""), ("", "pytorch_libtorch")}
    # Otherwise onnxruntime, which checks the exported graph, sends usage data over the network.
    assert config.platform or os.environ["ORT_DISABLE_TELEMETRY"] == "1"


def tutorial_client(url: str, text: str, number: int, steps: int) -> str:
    """Send the HTTP requests of one of the tutorial's clients."""
    for step in range(steps):
        body = {
            "inputs": [
                {"name": "INPUT_TOKENS", "shape": [1, 1], "datatype": "BYTES", "data": [[text]]}
            ],
            "outputs": [{"name": "NEXT_TOKENS"}],
            "parameters": {
                "sequence_id": number,
                "sequence_start": step == 0,
                "sequence_end": step == steps - 1,
            },
        }
        request = urllib.request.Request(
            f"{url}/v2/models/ensemble_pipeline/versions/1/infer", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            (output,) = json.loads(answer.read())["outputs"]
        assert output["shape"] == [1]
        text += output["data"][0]
    return text


def test_the_tutorials_clients_run_unchanged(
    triton: LiveTriton, small: Path, expected: dict[str, str]
) -> None:
    options = {"name": "ensemble_pipeline", "layout": "tutorial", **LIGHT}
    triton.build("gpt2-torchscript", str(small), **options)
    # Ours sends other tensors.
    assert not (triton.repository / "ensemble_pipeline" / "client.py").exists()
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(
            lambda i: tutorial_client(triton.server.http_url, PROMPTS[i], 1001 + i, 10), range(4)
        )
        for prompt, text in zip(PROMPTS, texts, strict=False):
            assert (prompt + expected[prompt]).startswith(text)
            assert len(text) > len(prompt)
