"""Tests of the plugin on a real Triton that the conformance suite does not have."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from pydantic import BaseModel, Field
from tritonclient.utils import InferenceServerException

from llmserve.errors import RequestRejectedError
from llmserve.testing import LiveTriton
from llmserve.testing.logprobs import check_logprobs

pytestmark = pytest.mark.long

PROMPT = "Programming in C++ is like"


def post(triton: LiveTriton, path: str, body: str) -> dict[str, Any]:
    """Do what ``curl -X POST localhost:8000/PATH -d BODY`` does."""
    request = urllib.request.Request(f"{triton.server.http_url}/{path}", body.encode())
    try:
        with urllib.request.urlopen(request) as response:
            reply: dict[str, Any] = json.loads(response.read())
    except urllib.error.HTTPError as error:
        reply = json.loads(error.read())
    return reply


@pytest.fixture
def falcon(triton: LiveTriton) -> str:
    return triton.build("hf", name="falcon7b", layout="tutorial-text")


@pytest.fixture
def batched(triton: LiveTriton) -> str:
    return triton.build("hf", decoupled=False)


@pytest.fixture
def delayed(triton: LiveTriton) -> str:
    """Triton waits for all requests, so that they form one batch even on a slow machine.

    Its prompts go through the chat template."""
    return triton.build("hf", decoupled=False, queue_delay_us=3_000_000, chat=True)


@pytest.fixture
def streaming(triton: LiveTriton) -> str:
    return triton.build("hf")


def test_the_tutorials_infer_command_works_verbatim(triton: LiveTriton, falcon: str) -> None:
    body = (
        '{"inputs": [{"name":"text_input","datatype":"BYTES","shape":[1],"data":["I am going"]}]}'
    )
    reply = post(triton, f"v2/models/{falcon}/infer", body)
    (text,) = reply["outputs"]
    assert (text["name"], text["shape"]) == ("text_output", [1])
    assert text["data"][0].startswith("I am going ")


def test_the_tutorials_generate_command_works_verbatim(triton: LiveTriton, falcon: str) -> None:
    for model in (falcon, triton.build("hf", max_batch_size=0, echo=True, decoupled=False)):
        reply = post(triton, f"v2/models/{model}/generate", '{"text_input":"How can you be"}')
        assert reply["text_output"].startswith("How can you be")
        assert reply["model_name"] == model


def test_eight_requests_with_different_parameters_share_a_batch(
    triton: LiveTriton, delayed: str
) -> None:
    requests, executions = triton.requests(delayed), triton.executions(delayed)
    parameters: list[dict[str, Any]] = [
        {"max_tokens": 40},
        {"max_tokens": 50, "temperature": 0.7, "seed": 1},
        {"max_tokens": 30, "stop_words": ["."]},
        {"max_tokens": 20, "top_k": 4, "seed": 2},
        {"max_tokens": 45, "repetition_penalty": 1.2},
        {"max_tokens": 35, "bad_words": ["the"]},
        {"max_tokens": 25, "min_tokens": 10},
        {"max_tokens": 40, "ignore_eos": True},
    ]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: triton.client.generate(delayed, PROMPT, **p), parameters))
    assert all(answer.text for answer in answers)
    assert triton.requests(delayed, at_least=requests + 8) == requests + 8
    assert triton.executions(delayed) - executions == 1


def test_a_short_answer_does_not_wait_for_a_long_one(triton: LiveTriton, delayed: str) -> None:
    requests, executions = triton.requests(delayed), triton.executions(delayed)
    order: list[str] = []

    def generate(name: str, tokens: int) -> None:
        triton.client.generate(delayed, PROMPT, max_tokens=tokens, ignore_eos=True)
        order.append(name)

    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(generate, "long", 300), pool.submit(generate, "short", 5)]:
            job.result()
    assert order == ["short", "long"]
    assert triton.requests(delayed, at_least=requests + 2) == requests + 2
    assert triton.executions(delayed) - executions == 1


def test_stop_words_do_not_leak(triton: LiveTriton, batched: str, streaming: str) -> None:
    whole = triton.client.generate(batched, PROMPT, max_tokens=40).text
    word = whole[10:14]
    for model in (batched, streaming):
        pieces = list(triton.client.stream(model, PROMPT, max_tokens=40, stop_words=[word]))
        assert "".join(piece.text for piece in pieces) == whole[: whole.index(word)]
        assert pieces[-1].finish_reason == "stop"


def test_bad_words_do_not_appear(triton: LiveTriton, batched: str) -> None:
    whole = triton.client.generate(batched, PROMPT, max_tokens=40).text
    word = whole.split()[1]
    other = triton.client.generate(batched, PROMPT, max_tokens=40, bad_words=[word]).text
    assert f" {word} " in f"{whole} "
    assert f" {word} " not in f"{other} "


def test_answers_are_streamed_in_pieces_or_returned_whole(
    triton: LiveTriton, streaming: str
) -> None:
    pieces = list(triton.client.stream(streaming, PROMPT, max_tokens=20))
    assert len(pieces) > 5
    url = f"v2/models/{streaming}/generate"
    reply = post(triton, url, json.dumps({"text_input": PROMPT, "max_tokens": 20}))
    assert reply["text_output"] == "".join(piece.text for piece in pieces)


def test_a_model_that_does_not_stream_refuses_with_the_build_option(
    triton: LiveTriton, batched: str
) -> None:
    body = json.dumps({"text_input": PROMPT, "stream": True})
    reply = post(triton, f"v2/models/{batched}/generate", body)
    assert "build it with --set decoupled=true" in reply["error"]


def test_what_the_pages_say_of_a_single_infer_holds(triton: LiveTriton, streaming: str) -> None:
    """Triton itself refuses it, so that the pages have its words and what to do instead."""
    prompt = grpc.InferInput("text_input", [1, 1], "BYTES")
    prompt.set_data_from_numpy(np.array([[PROMPT.encode()]], np.object_))
    refused = "doesn't support models with decoupled transaction policy"
    with (
        grpc.InferenceServerClient(triton.server.grpc_url) as client,
        pytest.raises(InferenceServerException, match=refused) as raised,
    ):
        client.infer(streaming, [prompt])
    assert raised.value.status() == "StatusCode.UNIMPLEMENTED"
    reply = post(triton, f"v2/models/{streaming}/generate", json.dumps({"text_input": PROMPT}))
    assert reply["text_output"] == triton.client.generate(streaming, PROMPT).text


def test_several_prompts_stream_concurrently(triton: LiveTriton, streaming: str) -> None:
    prompts = [PROMPT, "The capital of France is", "Once upon a time"]
    alone = [triton.client.generate(streaming, prompt, max_tokens=20).text for prompt in prompts]
    texts = ["", "", ""]
    for piece in triton.client.stream(streaming, prompts, max_tokens=20):
        texts[piece.index] += piece.text
    assert texts == alone


def test_an_abandoned_request_stops_generating(triton: LiveTriton, streaming: str) -> None:
    def seconds(tokens: int) -> float:
        started = time.perf_counter()
        triton.client.generate(streaming, PROMPT, max_tokens=tokens, ignore_eos=True)
        return time.perf_counter() - started

    def seconds_after_an_abandoned_request() -> float:
        for piece in triton.client.stream(streaming, PROMPT, max_tokens=480, ignore_eos=True):
            assert piece.text
            break
        return seconds(1)

    # If it were still running, the next request would wait for all of its tokens. A machine that
    # stalls may be slow once, but not every time.
    assert any(seconds_after_an_abandoned_request() < seconds(480) / 2 for _ in range(4))


def test_a_conversation_goes_through_the_chat_template(
    triton: LiveTriton, batched: str, delayed: str
) -> None:
    question = "What is the capital of France?"
    messages = [{"role": "user", "content": question}]
    by_messages = triton.client.generate(batched, messages=messages, max_tokens=30).text
    by_template = triton.client.generate(delayed, question, max_tokens=30).text
    assert by_messages == by_template
    assert by_messages != triton.client.generate(batched, question, max_tokens=30).text
    body = json.dumps({"messages": json.dumps(messages), "max_tokens": 30})
    reply = post(triton, f"v2/models/{batched}/generate", body)
    assert reply["text_output"] == by_messages


def test_token_counts_are_those_of_the_tokenizer(triton: LiveTriton, batched: str) -> None:
    from transformers import AutoTokenizer

    from llmserve.plugin import demo_model_path

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    answer = triton.client.generate(batched, PROMPT, max_tokens=12)
    assert answer.input_tokens == len(tokenizer.encode(PROMPT))
    assert answer.output_tokens == 12
    assert answer.text == tokenizer.decode(tokenizer.encode(PROMPT + answer.text)[-12:])


def test_greedy_answers_are_those_of_generate(triton: LiveTriton, batched: str) -> None:
    from transformers import pipeline

    from llmserve.plugin import demo_model_path

    generate = pipeline("text-generation", model=str(demo_model_path()), device="cpu")
    for prompt in (PROMPT, "Once upon a time", "Hello"):
        expected = generate(prompt, max_new_tokens=32, return_full_text=False, do_sample=False)
        assert (
            triton.client.generate(batched, prompt, max_tokens=32).text
            == (expected[0]["generated_text"])
        )


def test_log_probabilities_are_those_of_the_models_logits(triton: LiveTriton, batched: str) -> None:
    check_logprobs(triton, batched)


def test_an_image_reaches_a_model_that_sees_and_no_other(
    triton: LiveTriton, streaming: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from llmserve.testing.tiny_seeing import data_url, picture, save_seeing

    source = save_seeing("llava", tmp_path_factory.mktemp("seeing"))
    seeing = triton.build("hf", str(source))
    parts = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": parts}],
        "image_url": [data_url(picture(1))],
        "max_tokens": 8,
        "ignore_eos": True,
    }
    answer = triton.client.generate(seeing, **asked)
    assert answer.text
    # 16 tokens stand for the image, and one for each letter.
    assert answer.input_tokens == 16 + len("user: What is this?assistant:")
    assert "".join(piece.text for piece in triton.client.stream(seeing, **asked)) == answer.text
    with pytest.raises(RequestRejectedError, match="image 1 is an address, and none is opened"):
        triton.client.generate(seeing, **{**asked, "image_url": ["http://127.0.0.1/a.png"]})
    with pytest.raises(RequestRejectedError, match="does not take image_url"):
        triton.client.generate(streaming, **asked)


class City(BaseModel):
    name: str = Field(max_length=12)
    people: int = Field(ge=0, le=9999)


def test_an_answer_is_parsed_into_a_pydantic_model(triton: LiveTriton, streaming: str) -> None:
    city = triton.client.parse(streaming, PROMPT, City, max_tokens=200)
    assert isinstance(city, City)
    with pytest.raises(RequestRejectedError, match="cut off after 3 tokens"):
        triton.client.parse(streaming, PROMPT, City, max_tokens=3)
    with pytest.raises(RequestRejectedError, match="Unimplemented keys"):
        triton.client.generate(streaming, PROMPT, json_schema={"not": {}})
