"""Tests of the whole ensemble on a real Triton, with the stand-in in place of an engine."""

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

pytestmark = pytest.mark.long

ENGINES = Path(__file__).with_name("trtllm_builds") / "engines"
PROMPTS = ("Programming in C++ is like", "Once upon a time", "Hello", "The capital of France is")
# The two or three Python processes start in a tenth of the time if none of them loads torch.
LIGHT = {"tokenizer": "tokenizers"}
VARIANTS: dict[str, dict[str, Any]] = {
    "inflight": {"engine": str(ENGINES / "1.2"), "decoupled": False},
    "static": {"engine": str(ENGINES / "0.19"), "trtllm_version": "0.19", "batching": "static"}
    | LIGHT,
    "oldest": {"engine": str(ENGINES / "0.5"), "trtllm_version": "0.5.0"} | LIGHT,
    "streaming": {"engine": str(ENGINES / "1.2"), "bls_instance_count": 2} | LIGHT,
    "llmapi": {"layout": "llmapi", "stand_in": True, "decoupled": False} | LIGHT,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_answers_are_those_of_generate(triton: LiveTriton, variant: str) -> None:
    hf, model = triton.build("hf"), triton.build("trtllm", **VARIANTS[variant])
    for prompt in PROMPTS:
        expected = triton.client.generate(hf, prompt, max_tokens=48)
        answer = triton.client.generate(model, prompt, max_tokens=48)
        assert answer.text == expected.text
        assert answer.finish_reason == expected.finish_reason
        assert answer.input_tokens == expected.input_tokens
        # TensorRT-LLM does not return the token that ends an answer, so it is not counted; but
        # 0.5.0 pads short answers with it.
        is_uncounted = expected.finish_reason == "stop" and variant != "oldest"
        assert answer.output_tokens == (expected.output_tokens or 0) - is_uncounted


@pytest.mark.parametrize("variant", ["inflight", "static", "oldest", "streaming"])
@pytest.mark.parametrize(
    "options",
    [
        {"stop_words": ["ship", "the"]},
        {"stop_words": [" is"], "min_tokens": 4},
        {"bad_words": ["building", "a"]},
        {"exclude_input_in_output": False},
        {"repetition_penalty": 1.3},
        {"ignore_eos": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_have_the_same_effect_as_with_generate(
    triton: LiveTriton, variant: str, options: dict[str, Any]
) -> None:
    if variant == "oldest" and "bad_words" in options:
        pytest.skip("the engine of 0.5.0 does not support words")
    hf, model = triton.build("hf"), triton.build("trtllm", **VARIANTS[variant])
    for prompt in PROMPTS[:2]:
        expected = triton.client.generate(hf, prompt, max_tokens=24, **options)
        answer = triton.client.generate(model, prompt, max_tokens=24, **options)
        assert (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason)


@pytest.mark.parametrize(
    ("variant", "order"),
    [
        ("inflight", ["short", "long"]),
        ("streaming", ["short", "long"]),
        ("static", ["long", "short"]),
    ],
)
def test_requests_join_in_flight_and_wait_for_a_static_batch(
    triton: LiveTriton, variant: str, order: list[str]
) -> None:
    model = triton.build("trtllm", **VARIANTS[variant])

    def finishing_order() -> list[str]:
        finished: list[str] = []

        def ask(name: str, tokens: int) -> None:
            triton.client.generate(model, PROMPTS[0], max_tokens=tokens, ignore_eos=True)
            finished.append(name)

        with ThreadPoolExecutor(2) as pool:
            pool.submit(ask, "long", 500)
            # By then the engine has received the first request.
            time.sleep(0.3)
            pool.submit(ask, "short", 1)
        return finished

    # On a busy machine a request may be delayed, so one run in the expected order is enough.
    assert any(finishing_order() == order for _ in range(5))


def test_as_many_streams_as_the_engines_batch_start_at_once(triton: LiveTriton) -> None:
    """Without an instance for each of them, first tokens come in waves."""
    streams = 6
    options = {key: VARIANTS["streaming"][key] for key in ("engine", "tokenizer")}
    model = triton.build("trtllm", max_batch_size=streams, **options)

    def times(_: int) -> tuple[float, float]:
        first = 0.0
        for piece in triton.client.stream(model, PROMPTS[1], max_tokens=100, ignore_eos=True):
            first = first or (time.monotonic() if piece.text else 0.0)
        return first, time.monotonic()

    def waves() -> bool:
        with ThreadPoolExecutor(streams) as pool:
            firsts, ends = zip(*pool.map(times, range(streams)), strict=True)
        return bool(max(firsts) > min(ends))

    # A busy machine may delay a request by more than a whole answer.
    assert not all(waves() for _ in range(3))


def test_nvidias_plain_wiring_streams_too(triton: LiveTriton) -> None:
    """A piece consists of its text alone: spaces are kept, and there is no finish reason."""
    model = triton.build("trtllm", **VARIANTS["streaming"], stream_through="ensemble")
    whole = triton.client.generate(triton.build("hf"), PROMPTS[0], max_tokens=24)
    pieces = list(triton.client.stream(model, PROMPTS[0], max_tokens=24))
    assert len(pieces) > 5
    assert "".join(piece.text for piece in pieces) == whole.text


def test_many_streams_and_disconnecting_clients_do_not_crash_the_model(triton: LiveTriton) -> None:
    """Triton 2.51's Python backend crashes if one process requests two streams at once."""
    model = triton.build("trtllm", **VARIANTS["streaming"])

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
    """Send requests over one stream with the same id, as NVIDIA's clients do.

    Returns the tensors of each response. A second request is sent after the first has a response.
    """
    incoming: queue.Queue[Any] = queue.Queue()
    responses: list[Any] = []
    requested = [triton_grpc.InferRequestedOutput(name) for name in outputs] or None
    with triton_grpc.InferenceServerClient(triton.server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: incoming.put(error or result))
        for inputs in requests:
            tensors = []
            for name, value in inputs.items():
                tensor = triton_grpc.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
                tensors.append(tensor.set_data_from_numpy(value))
            client.async_stream_infer(model, tensors, outputs=requested, request_id="1")
            responses.append(incoming.get(timeout=60))
        client.stop_stream()
    responses += incoming.queue
    assert all(hasattr(response, "as_numpy") for response in responses), responses
    names = {output.name for response in responses for output in response.get_response().outputs}
    return [{name: response.as_numpy(name) for name in names} for response in responses]


@pytest.mark.parametrize("variant", ["inflight", "streaming", "llmapi"])
def test_end_to_end_grpc_client_reads_its_answer(triton: LiveTriton, variant: str) -> None:
    """Send the request of NVIDIA's client of 0.19, and read the answer as it does."""
    model = triton.build("trtllm", **VARIANTS[variant])
    inputs = {
        "text_input": text(PROMPTS[0]),
        "max_tokens": whole(12),
        "stream": TRUE if variant == "streaming" else FALSE,
        "beam_width": whole(1),
        "temperature": np.array([[1.0]], np.float32),
        "exclude_input_in_output": TRUE,
        "top_k": whole(1),
    }
    if variant != "llmapi":
        inputs["num_return_sequences"] = whole(1)
    answers = infer(triton, model, inputs, outputs=("text_output",))
    assert not any("batch_index" in answer for answer in answers)
    joined = "".join(answer["text_output"][0].decode("utf-8") for answer in answers)
    assert joined == triton.client.generate(triton.build("hf"), PROMPTS[0], max_tokens=12).text


def test_end_to_end_test_gets_the_same_from_the_models_one_by_one(triton: LiveTriton) -> None:
    """Send the requests of NVIDIA's test of 0.19 to each of the three models alone."""
    model = triton.build("trtllm", **VARIANTS["inflight"])
    words = {"bad_words": text(""), "stop_words": text("")}
    query = {"QUERY": text(PROMPTS[0]), "REQUEST_OUTPUT_LEN": whole(12)}
    query |= {f"{name.upper()}_DICT": value for name, value in words.items()}
    (preprocessed,) = infer(triton, f"{model}_preprocessing", query)
    names = {
        "input_ids": "INPUT_ID",
        "decoder_input_ids": "DECODER_INPUT_ID",
        "input_lengths": "REQUEST_INPUT_LEN",
        "request_output_len": "REQUEST_OUTPUT_LEN",
        "end_id": "OUT_END_ID",
        "pad_id": "OUT_PAD_ID",
    }
    inputs = {engine_name: preprocessed[name] for engine_name, name in names.items()}
    (answer,) = infer(triton, f"{model}_tensorrt_llm", inputs)
    tokens = {"TOKENS_BATCH": answer["output_ids"], "SEQUENCE_LENGTH": answer["sequence_length"]}
    (postprocessed,) = infer(triton, f"{model}_postprocessing", tokens, outputs=("OUTPUT",))
    query = {"text_input": text(PROMPTS[0]), "max_tokens": whole(12), **words}
    (ensemble,) = infer(triton, model, query, outputs=("text_output",))
    assert postprocessed["OUTPUT"].tolist() == ensemble["text_output"].tolist() != [b""]


@pytest.mark.parametrize(("variant", "kind"), [("inflight", np.int32), ("oldest", np.uint32)])
def test_clients_of_the_engine_alone_get_its_tokens(
    triton: LiveTriton, variant: str, kind: Any
) -> None:
    """Send what identity_test.py and inflight_batcher_llm_client.py send to tensorrt_llm."""
    model = triton.build("trtllm", **VARIANTS[variant])
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
    if variant == "inflight":
        assert answer["sequence_length"].shape == (1, 1)
        assert "cum_log_probs" not in answer, "the request asks for no scores"


def test_inflight_batcher_llm_client_stops_a_stream_by_its_id(triton: LiveTriton) -> None:
    """Send what --stop-after-ms sends: a request, and another with the same id and ``stop``."""
    model = f"{triton.build('trtllm', **VARIANTS['streaming'])}_tensorrt_llm"
    inputs = {
        "input_ids": np.array([[5, 6, 7]], np.int32),
        "input_lengths": whole(3),
        "request_output_len": whole(500),
        "streaming": TRUE,
    }
    stop = {**{name: np.zeros_like(value) for name, value in inputs.items()}, "stop": TRUE}
    # On a busy machine a stream may end before it is stopped.
    assert any(len(infer(triton, model, inputs, stop)) < 490 for _ in range(5))


def test_the_tutorials_client_runs_unchanged_on_its_version(triton: LiveTriton) -> None:
    """Send what the client of the TensorRT-LLM tutorial sends: tensors, and unsigned lengths."""
    model = triton.build("trtllm", **VARIANTS["oldest"])
    inputs = {
        "text_input": text(PROMPTS[0]),
        "max_tokens": whole(12, np.uint32),
        "bad_words": text(""),
        "stop_words": text(""),
    }
    (answer,) = infer(triton, model, inputs)
    expected = triton.client.generate(triton.build("hf"), PROMPTS[0], max_tokens=12).text
    assert [output.decode() for output in answer["text_output"]] == [expected]


def test_the_streaming_client_of_0_5_0_gets_the_answer_in_pieces(triton: LiveTriton) -> None:
    """Send what end_to_end_streaming_client.py sends, and read its answer as it does."""
    model = triton.build("trtllm", **VARIANTS["oldest"], decoupled=True)
    inputs = {
        "text_input": text(PROMPTS[0]),
        "max_tokens": whole(12, np.uint32),
        "bad_words": text(""),
        "stop_words": text(""),
        "stream": TRUE,
    }
    answers = infer(triton, model, inputs)
    pieces = [answer["text_output"][0].decode() for answer in answers]
    assert len(pieces) >= 12
    expected = triton.client.generate(triton.build("hf"), PROMPTS[0], max_tokens=12).text
    assert "".join(pieces) == expected
    with pytest.raises(RequestRejectedError, match="has no stop_words in a stream"):
        triton.client.generate(model, PROMPTS[0], stop_words=["a"])


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_engine_constrains_answers(
    triton: LiveTriton, decoupled: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The engine reads the description of the tokenizer that the build wrote into its folder."""
    engine = tmp_path_factory.mktemp("guided") / "engine"
    shutil.copytree(ENGINES / "1.2", engine)
    model = triton.build(
        "trtllm",
        engine=str(engine),
        decoupled=decoupled,
        guided_decoding_backend="xgrammar",
        **LIGHT,
    )
    for guide in (
        {"json_schema": json.dumps({"type": "array", "items": {"enum": [1, "é"]}, "minItems": 2})},
        {"choice": ["[1, 2]", "[true]"]},
        {"guided_decoding_guide_type": "regex", "guided_decoding_guide": r"\[\d{1,3}\]"},
    ):
        answer = triton.client.generate(model, PROMPTS[0], temperature=1.0, seed=3, **guide)
        assert answer.finish_reason == "stop"
        assert json.loads(answer.text)
    # A request without a guide is not constrained.
    free = triton.client.generate(model, PROMPTS[0], max_tokens=12).text
    assert free == triton.client.generate(triton.build("hf"), PROMPTS[0], max_tokens=12).text
    with pytest.raises(RequestRejectedError, match="guided_decoding_guide_type is one of"):
        triton.client.generate(
            model, "a", guided_decoding_guide_type="x", guided_decoding_guide="b"
        )


@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        ("inflight", {"json_schema": "{}"}, "answers cannot be constrained"),
        ("inflight", {"guided_decoding_guide_type": "json"}, "answers cannot be constrained"),
        ("inflight", {"min_p": 0.5}, "does not take min_p"),
        ("inflight", {"beam_width": 2}, "beam_width must be from 1 to 1"),
        ("oldest", {"frequency_penalty": 0.5}, "has no frequency_penalty"),
        ("oldest", {"presence_penalty": 0.5}, "both presence_penalty and repetition_penalty"),
        ("oldest", {"bad_words": ["a"]}, "has no bad_words"),
        ("oldest", {"prompt": "word " * 400}, "the engine accepts 384 of its context of 512"),
        ("streaming", {"top_k": 4096}, "top_k must be at most 1024"),
    ],
)
def test_unsupported_requests_are_refused_in_one_line(
    triton: LiveTriton, variant: str, options: dict[str, Any], message: str
) -> None:
    model = triton.build("trtllm", **VARIANTS[variant])
    with pytest.raises(RequestRejectedError, match=message) as caught:
        triton.client.generate(model, **{"prompt": PROMPTS[0], **options})
    assert "\n" not in str(caught.value)
