"""What the plugin does beyond the suite, on a real Triton."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import BaseModel, Field

from llmserve.errors import RequestRejectedError
from llmserve.testing import LiveTriton
from tests.logprobs import check_logprobs

PROMPT = "Programming in C++ is like"


def post(triton: LiveTriton, path: str, body: str) -> dict[str, Any]:
    """Do what ``curl -X POST localhost:8000/PATH -d BODY`` does."""
    request = urllib.request.Request(f"{triton.server.http_url}/{path}", body.encode())
    try:
        with urllib.request.urlopen(request) as answer:
            found: dict[str, Any] = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        found = json.loads(error.read())
    return found


@pytest.fixture
def falcon(triton: LiveTriton) -> str:
    return triton.build(
        "hf", name="falcon7b", max_batch_size=0, max_tokens=15, echo=True, decoupled=False
    )


@pytest.fixture
def batched(triton: LiveTriton) -> str:
    return triton.build("hf", decoupled=False)


@pytest.fixture
def patient(triton: LiveTriton) -> str:
    """Triton waits until all are there, so that they are one batch on a slow machine too.

    Its prompts go through the chat template."""
    return triton.build("hf", decoupled=False, queue_delay_us=3_000_000, chat=True)


@pytest.fixture
def streaming(triton: LiveTriton) -> str:
    return triton.build("hf")


def test_the_tutorials_infer_command_works_letter_by_letter(
    triton: LiveTriton, falcon: str
) -> None:
    body = (
        '{"inputs": [{"name":"text_input","datatype":"BYTES","shape":[1],"data":["I am going"]}]}'
    )
    answer = post(triton, f"v2/models/{falcon}/infer", body)
    text = next(output for output in answer["outputs"] if output["name"] == "text_output")
    assert text["shape"] == [1]
    assert text["data"][0].startswith("I am going ")


def test_the_tutorials_generate_command_works_letter_by_letter(
    triton: LiveTriton, falcon: str
) -> None:
    for model in (falcon, triton.build("hf", max_batch_size=0, echo=True)):
        answer = post(triton, f"v2/models/{model}/generate", '{"text_input":"How can you be"}')
        assert answer["text_output"].startswith("How can you be")
        assert answer["model_name"] == model


def test_eight_requests_with_different_wishes_share_a_batch(
    triton: LiveTriton, patient: str
) -> None:
    asked, before = triton.requests(patient), triton.executions(patient)
    wishes: list[dict[str, Any]] = [
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
        answers = list(pool.map(lambda w: triton.client.generate(patient, PROMPT, **w), wishes))
    assert all(answer.text for answer in answers)
    assert triton.requests(patient, at_least=asked + 8) == asked + 8
    assert triton.executions(patient) - before == 1


def test_a_short_answer_does_not_wait_for_a_long_neighbour(
    triton: LiveTriton, patient: str
) -> None:
    asked, before = triton.requests(patient), triton.executions(patient)
    order: list[str] = []

    def ask(name: str, tokens: int) -> None:
        triton.client.generate(patient, PROMPT, max_tokens=tokens, ignore_eos=True)
        order.append(name)

    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(ask, "long", 300), pool.submit(ask, "short", 5)]:
            job.result()
    assert order == ["short", "long"]
    assert triton.requests(patient, at_least=asked + 2) == asked + 2
    assert triton.executions(patient) - before == 1


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


def test_a_stream_comes_in_pieces_and_whole_if_not_asked_for(
    triton: LiveTriton, streaming: str
) -> None:
    pieces = list(triton.client.stream(streaming, PROMPT, max_tokens=20))
    assert len(pieces) > 5
    url = f"v2/models/{streaming}/generate"
    answer = post(triton, url, json.dumps({"text_input": PROMPT, "max_tokens": 20}))
    assert answer["text_output"] == "".join(piece.text for piece in pieces)


def test_a_stream_from_a_model_in_one_piece_is_refused_with_what_to_build(
    triton: LiveTriton, batched: str
) -> None:
    asked = json.dumps({"text_input": PROMPT, "stream": True})
    answer = post(triton, f"v2/models/{batched}/generate", asked)
    assert "build it with --set decoupled=true" in answer["error"]


def test_several_prompts_stream_beside_each_other(triton: LiveTriton, streaming: str) -> None:
    prompts = [PROMPT, "The capital of France is", "Once upon a time"]
    alone = [triton.client.generate(streaming, prompt, max_tokens=20).text for prompt in prompts]
    texts = ["", "", ""]
    for piece in triton.client.stream(streaming, prompts, max_tokens=20):
        texts[piece.index] += piece.text
    assert texts == alone


def test_a_request_that_is_left_stops_generating(triton: LiveTriton, streaming: str) -> None:
    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        triton.client.generate(streaming, PROMPT, max_tokens=tokens, ignore_eos=True)
        return time.perf_counter() - began

    def one_behind_a_request_that_was_left() -> float:
        for piece in triton.client.stream(streaming, PROMPT, max_tokens=480, ignore_eos=True):
            assert piece.text
            break
        return seconds(1)

    # Were it still running, the next would wait behind it for all of its tokens. A machine that
    # stalls may be slow once, but not every time.
    assert any(one_behind_a_request_that_was_left() < seconds(480) / 2 for _ in range(4))


def test_a_conversation_goes_through_the_chat_template(
    triton: LiveTriton, batched: str, patient: str
) -> None:
    question = "What is the capital of France?"
    talk = [{"role": "user", "content": question}]
    by_messages = triton.client.generate(batched, messages=talk, max_tokens=30).text
    by_template = triton.client.generate(patient, question, max_tokens=30).text
    assert by_messages == by_template
    assert by_messages != triton.client.generate(batched, question, max_tokens=30).text
    body = json.dumps({"messages": json.dumps(talk), "max_tokens": 30})
    answer = post(triton, f"v2/models/{batched}/generate", body)
    assert answer["text_output"] == by_messages


def test_counts_are_those_of_the_tokenizer(triton: LiveTriton, batched: str) -> None:
    from transformers import AutoTokenizer

    from llmserve.demo import demo_model_path

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    answer = triton.client.generate(batched, PROMPT, max_tokens=12)
    assert answer.input_tokens == len(tokenizer.encode(PROMPT))
    assert answer.output_tokens == 12
    assert answer.text == tokenizer.decode(tokenizer.encode(PROMPT + answer.text)[-12:])


def test_greedy_answers_are_those_of_generate(triton: LiveTriton, batched: str) -> None:
    from transformers import pipeline

    from llmserve.demo import demo_model_path

    alone = pipeline("text-generation", model=str(demo_model_path()), device="cpu")
    for prompt in (PROMPT, "Once upon a time", "Hello"):
        expected = alone(prompt, max_new_tokens=32, return_full_text=False, do_sample=False)
        assert (
            triton.client.generate(batched, prompt, max_tokens=32).text
            == (expected[0]["generated_text"])
        )


def test_log_probabilities_are_those_of_the_models_logits(triton: LiveTriton, batched: str) -> None:
    check_logprobs(triton, batched)


class City(BaseModel):
    name: str = Field(max_length=12)
    people: int = Field(ge=0, le=9999)


def test_an_answer_is_parsed_into_a_pydantic_model(triton: LiveTriton, streaming: str) -> None:
    city = triton.client.parse(streaming, PROMPT, City, max_tokens=200)
    assert isinstance(city, City)
    with pytest.raises(RequestRejectedError, match="cut after 3 tokens"):
        triton.client.parse(streaming, PROMPT, City, max_tokens=3)
    with pytest.raises(RequestRejectedError, match="Unimplemented keys"):
        triton.client.generate(streaming, PROMPT, json_schema={"not": {}})
