"""APIs other than chats and completions: tokenization, Anthropic's messages, and responses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from llmserve.plugin import demo_model_path
from llmserve.testing import LiveTriton, run
from llmserve_gateway.decisions import read_decision

from .process import Gateway

CHAT: list[Any] = [{"role": "user", "content": "What is the capital of Japan?"}]
ANSWER = "The capital of Japan is Tokyo."


def events(gateway: Gateway, path: str, body: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    request = {**body, "stream": True}
    with httpx.stream("POST", f"{gateway.root}{path}", json=request, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for event in answer.read().decode().strip().split("\n\n"):
            kind, data = event.split("\n")
            yield kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_tokenize_and_detokenize_are_inverse(gateway: Gateway, model: str) -> None:
    tokenized = gateway.post("/tokenize", {"model": model, "prompt": "Once upon a time"}).json()
    assert tokenized["count"] == len(tokenized["tokens"]) == 4
    assert tokenized["max_model_len"] == 512
    both = gateway.post("/tokenize", {"model": model, "messages": CHAT, "prompt": [None]})
    assert both.status_code == 400, both.text
    back = gateway.post("/detokenize", {"model": model, "tokens": tokenized["tokens"]}).json()
    assert back == {"prompt": "Once upon a time"}
    begun = [*CHAT, {"role": "assistant", "content": "Once upon"}]
    going_on = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    ids = gateway.post("/tokenize", {"model": model, **going_on}).json()["tokens"]
    text = gateway.post("/detokenize", {"model": model, "tokens": ids}).json()["prompt"]
    assert text.endswith("Once upon")
    chat = gateway.post("/tokenize", {"model": model, "messages": CHAT}).json()
    whole = gateway.client().chat.completions.create(model=model, messages=CHAT)
    assert whole.usage
    assert chat["count"] == whole.usage.prompt_tokens
    ids = gateway.client().completions.create(
        model=model, prompt=tokenized["tokens"], max_tokens=6, echo=True
    )
    text = gateway.client().completions.create(
        model=model, prompt="Once upon a time", max_tokens=6, echo=True
    )
    assert ids.choices[0].text == text.choices[0].text


def test_a_tokenizer_is_described_as_lm_eval_reads_it(gateway: Gateway, model: str) -> None:
    info = httpx.get(f"{gateway.root}/tokenizer_info", params={"model": model}).json()
    assert "messages" in info["chat_template"]
    assert info["eos_token"]
    # Not every tokenizer has the one that begins a text.
    for name in filter(info.get, ("bos_token", "eos_token")):
        asked = {"model": model, "prompt": info[name], "add_special_tokens": False}
        ids = gateway.post("/tokenize", asked).json()["tokens"]
        assert len(ids) == 1
        back = gateway.post("/detokenize", {"model": model, "tokens": ids})
        assert back.status_code == 200


def test_a_model_says_when_it_was_built(gateway: Gateway, model: str) -> None:
    created = gateway.client().models.retrieve(model).created
    assert time.time() - 24 * 3600 < created <= time.time()


@pytest.mark.parametrize("tokens", ["a", [10**7], [-1], [True], [[1], [2]], None])
def test_invalid_tokens_are_refused(gateway: Gateway, model: str, tokens: Any) -> None:
    answer = gateway.post("/detokenize", {"model": model, "tokens": tokens})
    assert answer.status_code == 400, answer.text


def test_how_likely_a_prompt_is(gateway: Gateway, model: str) -> None:
    """Like lm-eval, request the log-probabilities of the prompt and no further token."""
    body = {"model": model, "prompt": "Once upon a time", "echo": True, "logprobs": 2}
    echo = gateway.post("/v1/completions", {**body, "max_tokens": 0}).json()
    (choice,), usage = echo["choices"], echo["usage"]
    assert (choice["text"], usage["completion_tokens"]) == ("Once upon a time", 0)
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == usage["prompt_tokens"] == 4
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    longer = gateway.post("/v1/completions", {**body, "max_tokens": 2}).json()["choices"][0]
    assert longer["logprobs"]["token_logprobs"][:4] == logprobs["token_logprobs"]
    assert len(longer["logprobs"]["tokens"]) == 6
    assert longer["text"].startswith("Once upon a time there")


def test_a_bias_changes_the_answer(gateway: Gateway, model: str) -> None:
    word = gateway.post("/tokenize", {"model": model, "prompt": " the"}).json()["tokens"]
    request: Any = {"model": model, "prompt": "Once upon a time", "max_tokens": 3}
    completion = gateway.client().completions.create(**request, logit_bias={str(word[0]): 100})
    assert completion.choices[0].text == " the the the"


def test_answers_to_one_prompt_differ_by_their_seeds(gateway: Gateway, model: str) -> None:
    request: Any = {"model": model, "prompt": "The", "max_tokens": 12, "temperature": 2.0,
                    "seed": 7}  # fmt: skip
    several = gateway.client().completions.create(**request, n=3)
    assert len({choice.text for choice in several.choices}) > 1
    assert several.choices[0].text == gateway.client().completions.create(**request).choices[0].text
    stream = gateway.client().completions.create(**request, n=3, stream=True)
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in several.choices]


def test_anthropics_messages(gateway: Gateway, model: str) -> None:
    body = {"model": model, "max_tokens": 40, "messages": CHAT}
    whole = gateway.post("/v1/messages", body, **{"x-api-key": "none"}).json()
    assert whole["content"] == [{"type": "text", "text": ANSWER}]
    assert (whole["type"], whole["stop_reason"]) == ("message", "end_turn")
    stream = list(events(gateway, "/v1/messages", body))
    assert [kind for kind, _ in stream if kind != "content_block_delta"] == [
        "message_start", "content_block_start", "ping", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert all(kind == content["type"] for kind, content in stream)
    text = "".join(e["delta"]["text"] for kind, e in stream if kind == "content_block_delta")
    assert text == ANSWER
    assert stream[0][1]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert stream[-2][1]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    count = gateway.post("/v1/messages/count_tokens", {"model": model, "messages": CHAT}).json()
    assert count == {"input_tokens": whole["usage"]["input_tokens"]}
    cut = gateway.post("/v1/messages", {**body, "max_tokens": 2}).json()
    assert cut["stop_reason"] == "max_tokens"
    stops = {"stop_sequences": ["okyo", "Tokyo"]}
    stopped = gateway.post("/v1/messages", {**body, **stops}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "Tokyo")
    assert stopped["content"][0]["text"] == "The capital of Japan is "
    stream = list(events(gateway, "/v1/messages", {**body, **stops}))
    assert stream[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "Tokyo"}
    text = "".join(e["delta"]["text"] for kind, e in stream if kind == "content_block_delta")
    assert text == "The capital of Japan is "
    refused = gateway.post("/v1/messages", {"model": model, "messages": CHAT})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert refused.json()["type"] == "error"


def test_anthropics_own_client(gateway: Gateway, model: str) -> None:
    # It takes two seconds, and every worker imports this module.
    import anthropic

    client: Any = anthropic.Anthropic(base_url=gateway.root, api_key="none", max_retries=0).messages
    request: dict[str, Any] = {"model": model, "max_tokens": 40, "messages": CHAT}
    whole = client.create(**request)
    assert (whole.content[0].text, whole.stop_reason) == (ANSWER, "end_turn")
    with client.stream(**request) as stream:
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
    with client.stream(**{**request, **tools, "max_tokens": 200}) as stream:
        final = stream.get_final_message()
    for message in (client.create(**{**request, **tools, "max_tokens": 200}), final):
        (use,) = message.content
        assert (use.type, use.name, message.stop_reason) == ("tool_use", "weather", "tool_use")
        assert use.input["city"] in ("Tokyo", "Paris")
    for wrong, error in (
        ({"max_tokens": 5000}, anthropic.BadRequestError),
        ({"model": "nope"}, anthropic.NotFoundError),
    ):
        with pytest.raises(error) as refused:
            client.create(**{**request, **wrong})
        assert refused.value.body["type"] == "error"
        assert str(*wrong.values()) in refused.value.body["error"]["message"]


def test_anthropics_own_client_lists_models_continues_and_sends_documents(
    gateway: Gateway, model: str
) -> None:
    import anthropic

    client: Any = anthropic.Anthropic(base_url=gateway.root, api_key="none", max_retries=0)
    listed = {entry.id: entry for entry in client.models.list(limit=1)}
    assert model in listed, "it reads one page after the other"
    one = client.models.retrieve(model)
    for entry in (one, listed[model]):
        assert (entry.type, entry.id, entry.display_name) == ("model", model, model)
        assert entry.max_input_tokens == 512
        assert entry.created_at.year >= 1970
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("nope")
    assert missing.value.body["type"] == "error"
    assert missing.value.request_id
    request: dict[str, Any] = {"model": model, "max_tokens": 40}
    # The beginning of the answer, which is then what follows.
    begun = [*CHAT, {"role": "assistant", "content": "The capital of Japan"}]
    continued = client.messages.create(**request, messages=begun)
    assert continued.content[0].text == ANSWER.removeprefix("The capital of Japan")
    assert continued._request_id
    parts = [*CHAT, {"role": "assistant", "content": [{"type": "text", "text": "The capital of"}]}]
    with client.messages.stream(**request, messages=parts) as stream:
        assert "".join(stream.text_stream) == ANSWER.removeprefix("The capital of")
        assert stream.request_id
    counted = client.messages.count_tokens(model=model, messages=begun)
    assert counted.input_tokens == continued.usage.input_tokens

    def asked(*blocks: dict[str, Any]) -> Any:
        return client.messages.create(**request, messages=[{"role": "user", "content": [*blocks]}])

    def document(kind: str, **source: Any) -> dict[str, Any]:
        return {"type": "document", "source": {"type": kind, **source}, "title": "Notes"}

    question = {"type": "text", "text": CHAT[0]["content"]}
    note = "Tokyo is large."
    as_text = asked({"type": "text", "text": f"Notes\n{note}\n\n"}, question)
    for kind, source in (
        ("text", {"media_type": "text/plain", "data": note}),
        ("content", {"content": note}),
        ("content", {"content": [{"type": "text", "text": note}]}),
    ):
        read = asked(document(kind, **source), question)
        assert read.usage.input_tokens == as_text.usage.input_tokens
        assert read.content[0].text == as_text.content[0].text
    pdf = document("base64", media_type="application/pdf", data="JVBERi0=")
    cited = {**document("content", content=note), "citations": {"enabled": True}}
    for block, why in ((pdf, "document of type 'base64'"), (cited, "citations")):
        with pytest.raises(anthropic.BadRequestError, match=why):
            asked(block, question)


def test_anthropics_usage_says_what_of_a_prompt_was_cached(
    triton: LiveTriton, gateway: Gateway
) -> None:
    import anthropic

    caching = triton.build("iterative")
    long = [{"role": "user", "content": "What is the capital of Japan? " * 12}]
    client: Any = anthropic.Anthropic(base_url=gateway.root, api_key="none", max_retries=0).messages
    chats: Any = gateway.client().chat.completions
    chats.create(model=caching, messages=long, max_tokens=4)
    usage = chats.create(model=caching, messages=long, max_tokens=4).usage
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached >= 16
    request = {"model": caching, "max_tokens": 4, "messages": long}
    with client.stream(**request) as stream:
        final = stream.get_final_message()
    for message in (client.create(**request), final):
        counts = message.usage
        assert counts.cache_read_input_tokens == cached
        assert counts.input_tokens == usage.prompt_tokens - cached
        assert counts.cache_creation_input_tokens == 0


def test_what_only_anthropics_clients_read_is_for_them(gateway: Gateway, model: str) -> None:
    body = {"model": model, "max_tokens": 2, "messages": CHAT}
    for theirs in (False, True):
        headers = {
            "x-request-id": "mine",
            **({"anthropic-version": "2023-06-01"} if theirs else {}),
        }
        answers = [gateway.post("/v1/messages", {**body, **more}, **headers)
                   for more in ({}, {"stream": True}, {"max_tokens": 0})]  # fmt: skip
        answers += [gateway.post("/v1/messages/count_tokens", body, **headers)]
        answers += [httpx.get(f"{gateway.url}/models", headers=headers)]
        ids = {answer.headers.get("request-id") for answer in answers}
        assert ids == {"mine" if theirs else None}
        assert {answer.headers["x-request-id"] for answer in answers} == {"mine"}
        assert ("object" in answers[-1].json()) is not theirs
        for query in ("limit=0", "limit=x", "after_id=nope"):
            wrong = httpx.get(f"{gateway.url}/models?{query}", headers=headers)
            assert wrong.status_code == (400 if theirs else 200)


def test_stateless_responses(gateway: Gateway, model: str) -> None:
    client = gateway.client()
    whole = client.responses.create(model=model, input="What is the capital of Japan?")
    assert (whole.output_text, whole.status) == (ANSWER, "completed")
    assert whole.usage
    stream = client.responses.create(
        model=model, input=CHAT, instructions="Be short.", stream=True, max_output_tokens=3
    )
    received = list(stream)
    assert [event.type for event in received[:2]] == ["response.created", "response.in_progress"]
    assert received[-1].type == "response.incomplete"
    assert [event.sequence_number for event in received] == list(range(len(received)))
    refused = gateway.post("/v1/responses", {"model": model, "input": "x", "background": True})
    assert refused.json()["error"]["param"] == "background"
    assert whole.usage.input_tokens_details.cache_write_tokens == 0
    assert (whole.truncation, whole.service_tier, whole.background) == (
        "disabled",
        "default",
        False,
    )
    counted = client.responses.input_tokens.count(
        model=model, input="What is the capital of Japan?"
    )
    assert counted.input_tokens == whole.usage.input_tokens


def test_responses_include_logprobs(gateway: Gateway, model: str) -> None:
    client: Any = gateway.client()
    request: Any = {"model": model, "input": "What is the capital of Japan?", "top_logprobs": 2,
                    "include": ["message.output_text.logprobs"]}  # fmt: skip
    whole = client.responses.create(**request)
    ((part,),) = [item.content for item in whole.output]
    assert "".join(entry.token for entry in part.logprobs) == ANSWER
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert whole.top_logprobs == 2
    received = list(client.responses.create(**request, stream=True))
    deltas = [event for event in received if event.type == "response.output_text.delta"]
    streamed = [entry.logprob for event in deltas for entry in event.logprobs]
    assert streamed == pytest.approx([entry.logprob for entry in part.logprobs], abs=1e-3)
    (done,) = [event for event in received if event.type == "response.output_text.done"]
    assert len(done.logprobs) == len(streamed)
    assert not client.responses.create(model=model, input="Hi").output[0].content[0].logprobs


@pytest.mark.parametrize("args", [["--no-stream"], ["--stream"], ["--json"], ["--chat"]])
def test_llmserve_query_works_with_it(gateway: Gateway, model: str, args: list[str]) -> None:
    prompt = CHAT[0]["content"] if "--chat" in args else "Once upon a time"
    done = run("query", model, "--openai", gateway.url, prompt, "--max-tokens", "20", *args)
    if "--json" in args:
        assert json.loads(done.stdout)["output_tokens"] == 20
    assert (ANSWER if "--chat" in args else "there was a little robot") in done.stdout


def test_llmserve_query_reports_a_refusal_in_one_line(gateway: Gateway) -> None:
    done = run("query", "nope", "x", "--openai", gateway.url)
    assert (done.returncode, done.stdout) == (5, "")
    assert len(done.stderr.splitlines()) == 1


def test_decisions_are_what_transformers_computes(gateway: Gateway, triton: LiveTriton) -> None:
    """The engine of pages has read the state when the second question comes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = "Foxes live in woods. Cats live in houses, and sleep on the sofa. " * 3
    asked: dict[str, Any] = {
        "model": triton.build("iterative"),
        "state": state,
        "questions": {
            "who": {"type": "choice", "criteria": {"cats": None, "dogs": "they bark", "foxes": ""}},
            "how many": {"type": "score", "instructions": "How many?", "criteria": [*"abcde"]},
            "where": {"type": "choice", "criteria": {"woods": None, "houses": None}},
        },
    }
    answer = gateway.post("/v1/systemone", asked)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    model = AutoModelForCausalLM.from_pretrained(demo_model_path()).eval()
    tokens = 0
    for name, (_, options) in zip(
        asked["questions"], read_decision(asked).model_calls(), strict=True
    ):
        prompt = tokenizer.apply_chat_template(
            options["messages"], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        tokens += len(ids)
        labels = [
            tokenizer.encode(prompt + label, add_special_tokens=False)[-1]
            for label in options["logprobs_of"]
        ]
        with torch.inference_mode():
            scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(dim=-1)
        found = said["answers"][name]["probabilities"]
        expected = scores[labels].softmax(dim=-1).tolist()
        assert [*found.values()] == pytest.approx(expected, abs=1e-4)
        mass = scores[labels].exp().sum().item()
        assert said["diagnostics"][name]["label_mass"] == pytest.approx(mass, abs=1e-4)
    usage = said["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (tokens, 3)
    # Two of three have found at least the state.
    assert usage["input_tokens_details"]["cached_tokens"] >= len(tokenizer.encode(state))
    # To this vocabulary, yes is more than one token.
    asked["questions"] = {"woods": {"type": "noul", "instructions": "Do foxes live in woods?"}}
    refused = gateway.post("/v1/systemone", asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "questions")
    assert "'yes' is not a token of its own" in refused.json()["error"]["message"]
