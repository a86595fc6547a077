"""What is asked otherwise than by chats and completions: tokens, Anthropic's API, responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import pytest

from tests.support import run

from .process import Gateway

CHAT: list[Any] = [{"role": "user", "content": "What is the capital of Japan?"}]
ANSWER = "The capital of Japan is Tokyo."


def events(gateway: Gateway, path: str, body: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    asked = {**body, "stream": True}
    with httpx.stream("POST", f"{gateway.root}{path}", json=asked, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for event in answer.read().decode().strip().split("\n\n"):
            kind, data = event.split("\n")
            yield kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_a_text_is_its_tokens_and_its_tokens_are_the_text(gateway: Gateway, model: str) -> None:
    told = gateway.post("/tokenize", {"model": model, "prompt": "Once upon a time"}).json()
    assert told["count"] == len(told["tokens"]) == 4
    assert told["max_model_len"] == 512
    both = gateway.post("/tokenize", {"model": model, "messages": CHAT, "prompt": [None]})
    assert both.status_code == 400, both.text
    back = gateway.post("/detokenize", {"model": model, "tokens": told["tokens"]}).json()
    assert back == {"prompt": "Once upon a time"}
    chat = gateway.post("/tokenize", {"model": model, "messages": CHAT}).json()
    whole = gateway.client().chat.completions.create(model=model, messages=CHAT)
    assert whole.usage
    assert chat["count"] == whole.usage.prompt_tokens
    ids = gateway.client().completions.create(
        model=model, prompt=told["tokens"], max_tokens=6, echo=True
    )
    text = gateway.client().completions.create(
        model=model, prompt="Once upon a time", max_tokens=6, echo=True
    )
    assert ids.choices[0].text == text.choices[0].text


@pytest.mark.parametrize("tokens", ["a", [10**7], [-1], [True], [[1], [2]], None])
def test_what_is_no_token_is_refused(gateway: Gateway, model: str, tokens: Any) -> None:
    answer = gateway.post("/detokenize", {"model": model, "tokens": tokens})
    assert answer.status_code == 400, answer.text


def test_how_likely_a_prompt_is(gateway: Gateway, model: str) -> None:
    """As lm-eval asks: the prompt's own log-probabilities, and no token behind it."""
    body = {"model": model, "prompt": "Once upon a time", "echo": True, "logprobs": 2}
    silent = gateway.post("/v1/completions", {**body, "max_tokens": 0}).json()
    (choice,) = silent["choices"]
    assert (choice["text"], silent["usage"]["completion_tokens"]) == ("Once upon a time", 0)
    told = choice["logprobs"]
    assert len(told["tokens"]) == len(told["text_offset"]) == silent["usage"]["prompt_tokens"] == 4
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert all(value < 0 for value in told["token_logprobs"][1:])
    assert all(len(top) == 2 for top in told["top_logprobs"][1:])
    longer = gateway.post("/v1/completions", {**body, "max_tokens": 2}).json()["choices"][0]
    assert longer["logprobs"]["token_logprobs"][:4] == told["token_logprobs"]
    assert len(longer["logprobs"]["tokens"]) == 6
    assert longer["text"].startswith("Once upon a time there")


def test_a_bias_moves_the_answer(gateway: Gateway, model: str) -> None:
    word = gateway.post("/tokenize", {"model": model, "prompt": " the"}).json()["tokens"]
    asked: Any = {"model": model, "prompt": "Once upon a time", "max_tokens": 3}
    found = gateway.client().completions.create(**asked, logit_bias={str(word[0]): 100})
    assert found.choices[0].text == " the the the"


def test_answers_to_one_prompt_differ_by_their_seeds(gateway: Gateway, model: str) -> None:
    asked: Any = {"model": model, "prompt": "The", "max_tokens": 12, "temperature": 2.0, "seed": 7}
    several = gateway.client().completions.create(**asked, n=3)
    assert len({choice.text for choice in several.choices}) > 1
    assert several.choices[0].text == gateway.client().completions.create(**asked).choices[0].text
    stream = gateway.client().completions.create(**asked, n=3, stream=True)
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in several.choices]


def test_anthropics_messages(gateway: Gateway, model: str) -> None:
    body = {"model": model, "max_tokens": 40, "messages": CHAT}
    whole = gateway.post("/v1/messages", body, **{"x-api-key": "none"}).json()
    assert whole["content"] == [{"type": "text", "text": ANSWER}]
    assert (whole["type"], whole["stop_reason"]) == ("message", "end_turn")
    told = list(events(gateway, "/v1/messages", body))
    assert [kind for kind, _ in told if kind != "content_block_delta"] == [
        "message_start", "content_block_start", "ping", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert all(kind == content["type"] for kind, content in told)
    text = "".join(e["delta"]["text"] for kind, e in told if kind == "content_block_delta")
    assert text == ANSWER
    assert told[0][1]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert told[-2][1]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    count = gateway.post("/v1/messages/count_tokens", {"model": model, "messages": CHAT}).json()
    assert count == {"input_tokens": whole["usage"]["input_tokens"]}
    cut = gateway.post("/v1/messages", {**body, "max_tokens": 2}).json()
    assert cut["stop_reason"] == "max_tokens"
    stops = {"stop_sequences": ["okyo", "Tokyo"]}
    stopped = gateway.post("/v1/messages", {**body, **stops}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "Tokyo")
    assert stopped["content"][0]["text"] == "The capital of Japan is "
    told = list(events(gateway, "/v1/messages", {**body, **stops}))
    assert told[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "Tokyo"}
    text = "".join(e["delta"]["text"] for kind, e in told if kind == "content_block_delta")
    assert text == "The capital of Japan is "
    refused = gateway.post("/v1/messages", {"model": model, "messages": CHAT})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert refused.json()["type"] == "error"


def test_anthropics_own_client(gateway: Gateway, model: str) -> None:
    client: Any = anthropic.Anthropic(base_url=gateway.root, api_key="none", max_retries=0).messages
    asked: dict[str, Any] = {"model": model, "max_tokens": 40, "messages": CHAT}
    whole = client.create(**asked)
    assert (whole.content[0].text, whole.stop_reason) == (ANSWER, "end_turn")
    with client.stream(**asked) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert final.content[0].text == ANSWER
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = client.count_tokens(model=model, messages=CHAT)
    assert counted.input_tokens == whole.usage.input_tokens
    schema = {"type": "object", "properties": {"city": {"enum": ["Tokyo", "Paris"]}},
              "required": ["city"], "additionalProperties": False}  # fmt: skip
    tools = {"tools": [{"name": "weather", "description": "", "input_schema": schema}],
             "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}  # fmt: skip
    with client.stream(**{**asked, **tools, "max_tokens": 200}) as stream:
        final = stream.get_final_message()
    for told in (client.create(**{**asked, **tools, "max_tokens": 200}), final):
        (use,) = told.content
        assert (use.type, use.name, told.stop_reason) == ("tool_use", "weather", "tool_use")
        assert use.input["city"] in ("Tokyo", "Paris")
    for wrong, error in (
        ({"max_tokens": 5000}, anthropic.BadRequestError),
        ({"model": "nope"}, anthropic.NotFoundError),
    ):
        with pytest.raises(error) as refused:
            client.create(**{**asked, **wrong})
        assert refused.value.body["type"] == "error"
        assert str(*wrong.values()) in refused.value.body["error"]["message"]


def test_responses_without_a_memory(gateway: Gateway, model: str) -> None:
    client = gateway.client()
    whole = client.responses.create(model=model, input="What is the capital of Japan?")
    assert (whole.output_text, whole.status) == (ANSWER, "completed")
    assert whole.usage
    stream = client.responses.create(
        model=model, input=CHAT, instructions="Be short.", stream=True, max_output_tokens=3
    )
    told = list(stream)
    assert [event.type for event in told[:2]] == ["response.created", "response.in_progress"]
    assert told[-1].type == "response.incomplete"
    assert [event.sequence_number for event in told] == list(range(len(told)))
    refused = gateway.post("/v1/responses", {"model": model, "input": "x", "background": True})
    assert refused.json()["error"]["param"] == "background"


@pytest.mark.parametrize("words", [["--no-stream"], ["--stream"], ["--json"], ["--chat"]])
def test_llmserve_query_asks_it_too(gateway: Gateway, model: str, words: list[str]) -> None:
    prompt = CHAT[0]["content"] if "--chat" in words else "Once upon a time"
    done = run("query", model, "--openai", gateway.url, prompt, "--max-tokens", "20", *words)
    if "--json" in words:
        assert json.loads(done.stdout)["output_tokens"] == 20
    assert (ANSWER if "--chat" in words else "there was a little robot") in done.stdout


def test_llmserve_query_tells_a_refusal_in_one_line(gateway: Gateway) -> None:
    done = run("query", "nope", "x", "--openai", gateway.url)
    assert (done.returncode, done.stdout) == (5, "")
    assert len(done.stderr.splitlines()) == 1
