"""The whole ensemble on a real Triton, with the stand-in where an engine would be."""

from __future__ import annotations

import queue
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as triton_grpc
from tritonclient.utils import np_to_triton_dtype

from llmserve.errors import RequestRejectedError
from llmserve.testing import LiveTriton

ENGINES = Path(__file__).with_name("trtllm_builds") / "engines"
PROMPTS = ("Programming in C++ is like", "Once upon a time", "Hello", "The capital of France is")
WAYS: dict[str, dict[str, Any]] = {
    "inflight": {"engine": str(ENGINES / "1.2"), "decoupled": False},
    "static": {"engine": str(ENGINES / "0.12"), "trtllm_version": "0.12", "batching": "static"},
    "first": {"engine": str(ENGINES / "0.5"), "trtllm_version": "0.5.0"},
    "streaming": {"engine": str(ENGINES / "1.2"), "bls_instance_count": 2},
    "llmapi": {"layout": "llmapi", "stand_in": True, "decoupled": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_greedy_answers_are_those_of_generate(triton: LiveTriton, way: str) -> None:
    hf, model = triton.build("hf"), triton.build("trtllm", **WAYS[way])
    for prompt in PROMPTS:
        expected = triton.client.generate(hf, prompt, max_tokens=48)
        answer = triton.client.generate(model, prompt, max_tokens=48)
        assert answer.text == expected.text
        assert answer.finish_reason == expected.finish_reason
        assert answer.input_tokens == expected.input_tokens
        # TensorRT-LLM does not tell the token that ends an answer, and so does not count it; but
        # 0.5.0 fills up with it what an answer does not need.
        ended = expected.finish_reason == "stop" and way != "first"
        assert answer.output_tokens == (expected.output_tokens or 0) - ended


@pytest.mark.parametrize("way", ["inflight", "static", "first", "streaming"])
@pytest.mark.parametrize(
    "asked",
    [
        {"stop_words": ["ship", "the"]},
        {"stop_words": [" is"], "min_tokens": 4},
        {"bad_words": ["building", "a"]},
        {"exclude_input_in_output": False},
        {"repetition_penalty": 1.3},
        {"ignore_eos": True},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_is_asked_for_is_done_as_generate_does(
    triton: LiveTriton, way: str, asked: dict[str, Any]
) -> None:
    if way == "first" and "bad_words" in asked:
        pytest.skip("its engine takes no words")
    hf, model = triton.build("hf"), triton.build("trtllm", **WAYS[way])
    for prompt in PROMPTS[:2]:
        expected = triton.client.generate(hf, prompt, max_tokens=24, **asked)
        answer = triton.client.generate(model, prompt, max_tokens=24, **asked)
        assert (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason)


def test_the_same_seed_gives_the_same_text(triton: LiveTriton) -> None:
    model = triton.build("trtllm", **WAYS["inflight"])
    asked: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "top_k": 50}
    texts = [triton.client.generate(model, PROMPTS[0], seed=s, **asked).text for s in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_a_request_joins_a_stream_in_flight(triton: LiveTriton) -> None:
    model = triton.build("trtllm", **WAYS["streaming"])
    ends: list[str] = []
    began: queue.Queue[None] = queue.Queue()

    def ask(name: str, tokens: int) -> None:
        for _ in triton.client.stream(model, PROMPTS[0], max_tokens=tokens, ignore_eos=True):
            began.put(None)
        ends.append(name)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(ask, "long", 300)
        began.get(timeout=60)
        pool.submit(ask, "short", 5)
    assert ends == ["short", "long"]


@pytest.mark.parametrize(
    ("way", "order"), [("inflight", ["short", "long"]), ("static", ["long", "short"])]
)
def test_requests_join_in_flight_and_wait_for_a_static_batch(
    triton: LiveTriton, way: str, order: list[str]
) -> None:
    model = triton.build("trtllm", **WAYS[way])
    # Where all of the machine is busy one of them may be held up; how they are batched shows
    # whenever neither is.
    assert any(_ends_of_long_and_short(triton, model) == order for _ in range(3))


def _ends_of_long_and_short(triton: LiveTriton, model: str) -> list[str]:
    ends: list[str] = []

    def ask(name: str, tokens: int) -> None:
        triton.client.generate(model, PROMPTS[0], max_tokens=tokens, ignore_eos=True)
        ends.append(name)

    before = triton.requests(f"{model}_preprocessing")
    with ThreadPoolExecutor(2) as pool:
        pool.submit(ask, "long", 500)
        deadline = time.monotonic() + 60
        while triton.requests(f"{model}_preprocessing") == before:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        # What has been read is with the engine at once.
        time.sleep(0.1)
        pool.submit(ask, "short", 1)
    return ends


def test_nvidias_plain_wiring_streams_too(triton: LiveTriton) -> None:
    """Of a piece only the text is known: spaces are kept, and nothing is said of its end."""
    model = triton.build("trtllm", **WAYS["streaming"], stream_through="ensemble")
    whole = triton.client.generate(triton.build("hf"), PROMPTS[0], max_tokens=24)
    pieces = list(triton.client.stream(model, PROMPTS[0], max_tokens=24))
    assert len(pieces) > 5
    assert "".join(piece.text for piece in pieces) == whole.text


@pytest.mark.parametrize("way", ["inflight", "streaming", "llmapi"])
def test_nvidias_end_to_end_client_reads_its_answer(triton: LiveTriton, way: str) -> None:
    """What end_to_end_grpc_client.py of 0.19 sends, and how it reads what comes."""
    model = triton.build("trtllm", **WAYS[way])
    inputs = {
        "text_input": np.array([[PROMPTS[0]]], object),
        "max_tokens": np.array([[12]], np.int32),
        "stream": np.array([[way == "streaming"]]),
        "beam_width": np.array([[1]], np.int32),
        "temperature": np.array([[1.0]], np.float32),
    }
    if way != "llmapi":
        inputs["num_return_sequences"] = np.array([[1]], np.int32)
    inputs["exclude_input_in_output"] = np.array([[True]])
    inputs["top_k"] = np.array([[1]], np.int32)
    text = ""
    for result in infer(triton, model, inputs, outputs=("text_output",)):
        assert result.as_numpy("batch_index") is None
        text += result.as_numpy("text_output")[0].decode("utf-8")
    assert text == triton.client.generate(triton.build("hf"), PROMPTS[0], max_tokens=12).text


@pytest.mark.parametrize("way", ["inflight", "first"])
def test_nvidias_clients_of_the_engine_alone_get_its_tokens(triton: LiveTriton, way: str) -> None:
    """What identity_test.py and inflight_batcher_llm_client.py send to tensorrt_llm."""
    model = triton.build("trtllm", **WAYS[way])
    length = np.uint32 if way == "first" else np.int32
    inputs = {
        "input_ids": np.array([[28524, 287, 5093]], np.int32) % 1000,
        "input_lengths": np.array([[3]], np.int32),
        "request_output_len": np.array([[8]], length),
        "beam_width": np.array([[1]], length),
        "temperature": np.array([[1.0]], np.float32),
        "streaming": np.array([[False]]),
    }
    (answer,) = infer(triton, f"{model}_tensorrt_llm", inputs)
    assert answer.as_numpy("output_ids").shape[:2] == (1, 1)
    if way == "inflight":
        assert answer.as_numpy("sequence_length").shape == (1, 1)
        assert answer.as_numpy("cum_log_probs") is None, "nobody asked for scores"


def test_nvidias_clients_stop_a_stream_by_its_id(triton: LiveTriton) -> None:
    """What inflight_batcher_llm_client.py --stop-after-ms sends: an id, and then stop with it."""
    model = f"{triton.build('trtllm', **WAYS['streaming'])}_tensorrt_llm"
    inputs = {
        "input_ids": np.array([[5, 6, 7]], np.int32),
        "input_lengths": np.array([[3]], np.int32),
        "request_output_len": np.array([[400]], np.int32),
        "streaming": np.array([[True]]),
    }
    answers: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(triton.server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        client.async_stream_infer(model, tensors(inputs), request_id="my-stream")
        assert answers.get(timeout=60).as_numpy("output_ids") is not None
        stop = {name: np.zeros_like(value) for name, value in inputs.items()}
        stop |= {"stop": np.array([[True]])}
        client.async_stream_infer(model, tensors(stop), request_id="my-stream")
        client.stop_stream()
    pieces = list(answers.queue)
    assert all(hasattr(piece, "as_numpy") for piece in pieces), pieces
    assert len(pieces) < 390


def tensors(inputs: dict[str, Any]) -> list[Any]:
    found = []
    for name, value in inputs.items():
        tensor = triton_grpc.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        found.append(tensor)
    return found


def infer(
    triton: LiveTriton, model: str, inputs: dict[str, Any], outputs: tuple[str, ...] = ()
) -> list[Any]:
    """Send a request over a stream of its own, as NVIDIA's clients do, and return what comes."""
    answers: queue.Queue[Any] = queue.Queue()
    wanted = [triton_grpc.InferRequestedOutput(name) for name in outputs] or None
    with triton_grpc.InferenceServerClient(triton.server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        client.async_stream_infer(model, tensors(inputs), outputs=wanted, request_id="1")
        client.stop_stream()
    found = list(answers.queue)
    assert all(hasattr(answer, "as_numpy") for answer in found), found
    return found


def test_many_streams_do_not_bring_the_model_down(triton: LiveTriton) -> None:
    """Triton 2.51's Python backend crashed where one process asked for several streams."""
    model = triton.build("trtllm", **WAYS["streaming"])

    def ask(client: int) -> None:
        for number in range(12):
            prompt = " ".join(["word", str(client)] * (1 + (client + number) % 7))
            assert list(triton.client.stream(model, prompt, max_tokens=1 + number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))


def test_the_tutorials_client_runs_unchanged_on_its_version(triton: LiveTriton) -> None:
    """What the client of the TensorRT-LLM tutorial sends: tensors, and lengths without a sign."""
    model = triton.build("trtllm", **WAYS["first"])
    answers: queue.Queue[Any] = queue.Queue()
    inputs = []
    for name, value in (
        ("text_input", np.array([[PROMPTS[0]]], object)),
        ("max_tokens", np.array([[12]], np.uint32)),
        ("bad_words", np.array([[""]], object)),
        ("stop_words", np.array([[""]], object)),
    ):
        kind = "UINT32" if name == "max_tokens" else "BYTES"
        tensor = triton_grpc.InferInput(name, value.shape, kind)
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    with triton_grpc.InferenceServerClient(triton.server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        client.async_stream_infer(model, inputs)
        answer = answers.get(timeout=60)
        client.stop_stream()
    text = answer.as_numpy("text_output")
    assert text.shape == (1,)
    expected = triton.client.generate(triton.build("hf"), PROMPTS[0], max_tokens=12).text
    assert text.reshape(-1)[0].decode() == expected


@pytest.mark.parametrize(
    ("way", "asked", "message"),
    [
        ("inflight", {"max_tokens": 5000}, "context of 512"),
        ("inflight", {"min_p": 0.5}, "does not take min_p"),
        ("inflight", {"temperatur": 0.5}, "did you mean 'temperature'"),
        ("inflight", {"beam_width": 2}, "beam_width must be from 1 to 1"),
        ("first", {"frequency_penalty": 0.5}, "has no frequency_penalty"),
        ("streaming", {"top_k": 4096}, "top_k must be at most 1024"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    triton: LiveTriton, way: str, asked: dict[str, Any], message: str
) -> None:
    model = triton.build("trtllm", **WAYS[way])
    with pytest.raises(RequestRejectedError, match=message) as caught:
        triton.client.generate(model, PROMPTS[0], **asked)
    assert "\n" not in str(caught.value)


def test_a_prompt_longer_than_the_engine_takes_is_refused_with_its_number(
    triton: LiveTriton,
) -> None:
    model = triton.build("trtllm", **WAYS["first"])
    with pytest.raises(RequestRejectedError, match="the engine takes 384 of its context of 512"):
        triton.client.generate(model, "word " * 400, max_tokens=4)
