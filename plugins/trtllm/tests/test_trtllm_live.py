"""The whole ensemble on a real Triton, with the stand-in where an engine would be."""

from __future__ import annotations

import json
import queue
import shutil
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
# Their two or three processes start in a tenth of the time where none of them loads torch.
LIGHT = {"tokenizer": "tokenizers"}
WAYS: dict[str, dict[str, Any]] = {
    "inflight": {"engine": str(ENGINES / "1.2"), "decoupled": False},
    "static": {"engine": str(ENGINES / "0.12"), "trtllm_version": "0.12", "batching": "static"}
    | LIGHT,
    "first": {"engine": str(ENGINES / "0.5"), "trtllm_version": "0.5.0"} | LIGHT,
    "streaming": {"engine": str(ENGINES / "1.2"), "bls_instance_count": 2} | LIGHT,
    "llmapi": {"layout": "llmapi", "stand_in": True, "decoupled": False} | LIGHT,
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


@pytest.mark.parametrize(
    ("way", "order"),
    [
        ("inflight", ["short", "long"]),
        ("streaming", ["short", "long"]),
        ("static", ["long", "short"]),
    ],
)
def test_requests_join_in_flight_and_wait_for_a_static_batch(
    triton: LiveTriton, way: str, order: list[str]
) -> None:
    model = triton.build("trtllm", **WAYS[way])

    def ends() -> list[str]:
        found: list[str] = []

        def ask(name: str, tokens: int) -> None:
            triton.client.generate(model, PROMPTS[0], max_tokens=tokens, ignore_eos=True)
            found.append(name)

        with ThreadPoolExecutor(2) as pool:
            pool.submit(ask, "long", 500)
            # By then the engine has it.
            time.sleep(0.3)
            pool.submit(ask, "short", 1)
        return found

    # On a busy machine one of them may be held up; how they are batched shows whenever neither is.
    assert any(ends() == order for _ in range(5))


def test_nvidias_plain_wiring_streams_too(triton: LiveTriton) -> None:
    """Of a piece only the text is known: spaces are kept, and nothing is said of its end."""
    model = triton.build("trtllm", **WAYS["streaming"], stream_through="ensemble")
    whole = triton.client.generate(triton.build("hf"), PROMPTS[0], max_tokens=24)
    pieces = list(triton.client.stream(model, PROMPTS[0], max_tokens=24))
    assert len(pieces) > 5
    assert "".join(piece.text for piece in pieces) == whole.text


def test_many_streams_and_clients_that_leave_do_not_bring_the_model_down(
    triton: LiveTriton,
) -> None:
    """Triton 2.51's Python backend crashes where one process asks for two streams at a time."""
    model = triton.build("trtllm", **WAYS["streaming"])

    def ask(client: int) -> None:
        for number in range(12):
            prompt = " ".join(["word", str(client)] * (1 + (client + number) % 7))
            pieces = triton.client.stream(model, prompt, max_tokens=4 + number, ignore_eos=True)
            assert next(pieces).text
            if number % 3:
                assert list(pieces)
            else:
                pieces.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))


TRUE, FALSE = np.array([[True]]), np.array([[False]])


def whole(value: int, kind: Any = np.int32) -> Any:
    return np.array([[value]], kind)


def text(value: str) -> Any:
    return np.array([[value]], object)


def infer(triton: LiveTriton, model: str, *requests: dict[str, Any], outputs: Any = ()) -> Any:
    """Send requests over a stream of their own, with one id, as NVIDIA's clients do.

    Returns what comes, by its tensors. The second is sent when the first has begun to answer.
    """
    answers: queue.Queue[Any] = queue.Queue()
    found: list[Any] = []
    wanted = [triton_grpc.InferRequestedOutput(name) for name in outputs] or None
    with triton_grpc.InferenceServerClient(triton.server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        for inputs in requests:
            tensors = []
            for name, value in inputs.items():
                tensor = triton_grpc.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
                tensors.append(tensor.set_data_from_numpy(value))
            client.async_stream_infer(model, tensors, outputs=wanted, request_id="1")
            found.append(answers.get(timeout=60))
        client.stop_stream()
    found += answers.queue
    assert all(hasattr(answer, "as_numpy") for answer in found), found
    names = {output.name for answer in found for output in answer.get_response().outputs}
    return [{name: answer.as_numpy(name) for name in names} for answer in found]


@pytest.mark.parametrize("way", ["inflight", "streaming", "llmapi"])
def test_end_to_end_grpc_client_reads_its_answer(triton: LiveTriton, way: str) -> None:
    """What NVIDIA's client of 0.19 sends, and how it reads what comes."""
    model = triton.build("trtllm", **WAYS[way])
    inputs = {
        "text_input": text(PROMPTS[0]),
        "max_tokens": whole(12),
        "stream": TRUE if way == "streaming" else FALSE,
        "beam_width": whole(1),
        "temperature": np.array([[1.0]], np.float32),
        "exclude_input_in_output": TRUE,
        "top_k": whole(1),
    }
    if way != "llmapi":
        inputs["num_return_sequences"] = whole(1)
    answers = infer(triton, model, inputs, outputs=("text_output",))
    assert not any("batch_index" in answer for answer in answers)
    found = "".join(answer["text_output"][0].decode("utf-8") for answer in answers)
    assert found == triton.client.generate(triton.build("hf"), PROMPTS[0], max_tokens=12).text


def test_end_to_end_test_gets_the_same_from_the_models_one_by_one(triton: LiveTriton) -> None:
    """What NVIDIA's test of 0.14 and later sends to each of the three models by itself."""
    model = triton.build("trtllm", **WAYS["inflight"])
    words = {"bad_words": text(""), "stop_words": text("")}
    asked = {"QUERY": text(PROMPTS[0]), "REQUEST_OUTPUT_LEN": whole(12)}
    asked |= {f"{name.upper()}_DICT": value for name, value in words.items()}
    (made,) = infer(triton, f"{model}_preprocessing", asked)
    led = {
        "input_ids": "INPUT_ID",
        "decoder_input_ids": "DECODER_INPUT_ID",
        "input_lengths": "REQUEST_INPUT_LEN",
        "request_output_len": "REQUEST_OUTPUT_LEN",
        "end_id": "OUT_END_ID",
        "pad_id": "OUT_PAD_ID",
    }
    inputs = {inside: made[outside] for inside, outside in led.items()}
    (answer,) = infer(triton, f"{model}_tensorrt_llm", inputs)
    tokens = {"TOKENS_BATCH": answer["output_ids"], "SEQUENCE_LENGTH": answer["sequence_length"]}
    (written,) = infer(triton, f"{model}_postprocessing", tokens, outputs=("OUTPUT",))
    asked = {"text_input": text(PROMPTS[0]), "max_tokens": whole(12), **words}
    (whole_way,) = infer(triton, model, asked, outputs=("text_output",))
    assert written["OUTPUT"].tolist() == whole_way["text_output"].tolist() != [b""]


@pytest.mark.parametrize(("way", "kind"), [("inflight", np.int32), ("first", np.uint32)])
def test_clients_of_the_engine_alone_get_its_tokens(
    triton: LiveTriton, way: str, kind: Any
) -> None:
    """What identity_test.py and inflight_batcher_llm_client.py send to tensorrt_llm."""
    model = triton.build("trtllm", **WAYS[way])
    inputs = {
        "input_ids": np.array([[524, 287, 93]], np.int32),
        "input_lengths": whole(3),
        "request_output_len": whole(8, kind),
        "beam_width": whole(1, kind),
        "temperature": np.array([[1.0]], np.float32),
        "streaming": FALSE,
    }
    (answer,) = infer(triton, f"{model}_tensorrt_llm", inputs)
    assert answer["output_ids"].shape[:2] == (1, 1)
    if way == "inflight":
        assert answer["sequence_length"].shape == (1, 1)
        assert "cum_log_probs" not in answer, "nobody asked for scores"


def test_inflight_batcher_llm_client_stops_a_stream_by_its_id(triton: LiveTriton) -> None:
    """What it sends with --stop-after-ms: a request, and another of the same id that says stop."""
    model = f"{triton.build('trtllm', **WAYS['streaming'])}_tensorrt_llm"
    inputs = {
        "input_ids": np.array([[5, 6, 7]], np.int32),
        "input_lengths": whole(3),
        "request_output_len": whole(500),
        "streaming": TRUE,
    }
    stop = {**{name: np.zeros_like(value) for name, value in inputs.items()}, "stop": TRUE}
    # On a busy machine a stream may have ended before it is stopped.
    assert any(len(infer(triton, model, inputs, stop)) < 490 for _ in range(5))


def test_the_tutorials_client_runs_unchanged_on_its_version(triton: LiveTriton) -> None:
    """What the client of the TensorRT-LLM tutorial sends: tensors, and lengths without a sign."""
    model = triton.build("trtllm", **WAYS["first"])
    inputs = {
        "text_input": text(PROMPTS[0]),
        "max_tokens": whole(12, np.uint32),
        "bad_words": text(""),
        "stop_words": text(""),
    }
    (answer,) = infer(triton, model, inputs)
    expected = triton.client.generate(triton.build("hf"), PROMPTS[0], max_tokens=12).text
    assert [one.decode() for one in answer["text_output"]] == [expected]


@pytest.mark.parametrize("decoupled", [False, True])
def test_an_answer_is_held_to_a_schema_by_the_engine(
    triton: LiveTriton, decoupled: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As told by what the build wrote of the tokenizer beside the engine."""
    engine = tmp_path_factory.mktemp("guided") / "engine"
    shutil.copytree(ENGINES / "1.2", engine)
    model = triton.build(
        "trtllm",
        engine=str(engine),
        decoupled=decoupled,
        guided_decoding_backend="xgrammar",
        **LIGHT,
    )
    for asked in (
        {"json_schema": json.dumps({"type": "array", "items": {"enum": [1, "é"]}, "minItems": 2})},
        {"choice": ["[1, 2]", "[true]"]},
        {"guided_decoding_guide_type": "regex", "guided_decoding_guide": r"\[\d{1,3}\]"},
    ):
        answer = triton.client.generate(model, PROMPTS[0], temperature=1.0, seed=3, **asked)
        assert answer.finish_reason == "stop"
        assert json.loads(answer.text)
    # Beside it, who asks for nothing is free.
    free = triton.client.generate(model, PROMPTS[0], max_tokens=12).text
    assert free == triton.client.generate(triton.build("hf"), PROMPTS[0], max_tokens=12).text
    with pytest.raises(RequestRejectedError, match="guided_decoding_guide_type is one of"):
        triton.client.generate(
            model, "a", guided_decoding_guide_type="x", guided_decoding_guide="b"
        )


@pytest.mark.parametrize(
    ("way", "asked", "message"),
    [
        ("inflight", {"json_schema": "{}"}, "cannot hold answers to a form"),
        ("inflight", {"guided_decoding_guide_type": "json"}, "cannot hold answers to a form"),
        ("inflight", {"min_p": 0.5}, "does not take min_p"),
        ("inflight", {"beam_width": 2}, "beam_width must be from 1 to 1"),
        ("first", {"frequency_penalty": 0.5}, "has no frequency_penalty"),
        ("first", {"prompt": "word " * 400}, "the engine takes 384 of its context of 512"),
        ("streaming", {"top_k": 4096}, "top_k must be at most 1024"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    triton: LiveTriton, way: str, asked: dict[str, Any], message: str
) -> None:
    model = triton.build("trtllm", **WAYS[way])
    with pytest.raises(RequestRejectedError, match=message) as caught:
        triton.client.generate(model, **{"prompt": PROMPTS[0], **asked})
    assert "\n" not in str(caught.value)
