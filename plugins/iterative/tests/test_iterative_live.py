"""In-flight batching on a real Triton: joining requests, unusual clients, disconnects."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw
from prometheus_client.parser import text_string_to_metric_families
from soak import Soak, figure
from transformers import AutoModelForImageTextToText, AutoTokenizer, Llama4Config
from tritonclient import grpc as triton_grpc

from llmserve.errors import RequestRejectedError
from llmserve.plugin import demo_model_path
from llmserve.runtime.contract import image_url
from llmserve.testing import LiveTriton, run
from llmserve.testing.live import completion_order
from llmserve.testing.logprobs import check_logprobs
from llmserve.testing.tiny_models import make_model
from llmserve.testing.tiny_seeing import conversations, data_url, picture, save_seeing

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


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_seeing("llava", tmp_path_factory.mktemp("seeing")))


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "llava", "qwen3_vl"])
def test_prompts_with_images_and_without_answer_as_those_of_hf(
    triton: LiveTriton, tmp_path: Path, family: str
) -> None:
    source = str(save_seeing(family, tmp_path))
    hf, model = triton.build("hf", source), triton.build("iterative", source)
    asked = conversations((1, 0, 2, 4, 0, 1, 3, 2))
    expected = [triton.client.generate(hf, **each) for each in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda each: triton.client.generate(model, **each), asked))
    assert [each.text for each in found] == [each.text for each in expected]
    assert [each.input_tokens for each in found] == [each.input_tokens for each in expected]
    assert triton.client.generate(model, **asked[3]).text == expected[3].text
    with pytest.raises(RequestRejectedError, match="image 1 is an address, and none is opened"):
        triton.client.generate(model, **{**asked[0], "image_url": ["http://127.0.0.1/a.png"]})


def test_the_demo_that_sees_says_what_is_drawn(triton: LiveTriton) -> None:
    drawing = Image.new("RGB", (320, 240), "white")
    ImageDraw.Draw(drawing).ellipse((90, 50, 230, 190), fill="red")
    model = triton.build("iterative", "demo-vision")
    for question, answer in (
        ("What do you see?", "I see a red circle on a white background."),
        ("Which colour is it?", "It is red."),
    ):
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        said = triton.client.generate(
            model, messages=[{"role": "user", "content": parts}], image_url=[data_url(drawing)]
        )
        assert said.text == answer


def test_the_client_of_a_model_shows_it_images(
    triton: LiveTriton, tmp_path: Path, seeing: str
) -> None:
    model = triton.build("iterative", seeing)
    arguments: list[str] = []
    # As large as a photo: more than what options of requests usually have.
    for number, size in enumerate(((24, 16), (2000, 1500))):
        picture(number, *size).save(tmp_path / f"{number}.png")
        arguments += ["--image", str(tmp_path / f"{number}.png")]
    client = triton.repository / model / "client.py"
    words = [*arguments, "--url", triton.server.grpc_url, "--max-tokens", "8", "--json"]
    asked = subprocess.run(
        [sys.executable, str(client), "What?", *words],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What?"}]
    expected = triton.client.generate(
        model, messages=[{"role": "user", "content": content}], max_tokens=8,
        image_url=[image_url(path) for path in sorted(tmp_path.glob("*.png"))],
    )  # fmt: skip
    answer = json.loads(asked.stdout)
    assert (answer["text"], answer["input_tokens"]) == (expected.text, expected.input_tokens)


def test_a_model_that_sees_is_built_for_text_alone(triton: LiveTriton, seeing: str) -> None:
    models = [triton.build(plugin, seeing, max_images=0) for plugin in ("hf", "iterative")]
    texts = [triton.client.generate(m, PROMPT, max_tokens=8, ignore_eos=True).text for m in models]
    assert texts[0] == texts[1]
    with pytest.raises(RequestRejectedError, match="does not take image_url"):
        triton.client.generate(models[1], PROMPT, image_url=[data_url(picture(1))])


def test_a_model_whose_images_are_not_read_is_served_for_its_text(
    tmp_path: Path, triton: LiveTriton
) -> None:
    source = save_seeing("llava", tmp_path / "llava")
    layers = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }  # fmt: skip
    text = {**layers, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 200}
    text |= {"intermediate_size_mlp": 48, "num_local_experts": 2}
    vision = {**layers, "image_size": 16, "patch_size": 4, "intermediate_size": 128}
    config = Llama4Config(text_config=text, vision_config=vision)
    # Beside the tokenizer, and with a processor that is never loaded.
    AutoModelForImageTextToText.from_config(config).save_pretrained(source)
    words = ("--plugin", "iterative", "--model", str(source), "--name", "for-text")
    built = run("build", *words, "--output", str(triton.repository))
    assert built.returncode == 0, built.stderr
    note = "iterative reads no images with a model of the kind llama4: it is served for text alone"
    assert note in " ".join(built.stderr.split())
    triton.load("for-text")
    assert triton.client.generate("for-text", PROMPT, max_tokens=4, ignore_eos=True).input_tokens
    triton.unload("for-text")


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
