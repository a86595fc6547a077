"""Measurements of an OpenAI endpoint: a small server answers like OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from llmserve.client import OpenAIApi
from llmserve.errors import UsageError
from llmserve.testing.web import http_server, reply
from llmserve_bench.figures import figures_of
from llmserve_bench.measure import Plan, bench
from llmserve_bench.output import conditions_of, tables_of
from llmserve_bench.prompts import Lengths, Prompts
from llmserve_bench.results import Load, Run
from llmserve_bench.senders import Api, Parts, add
from llmserve_bench.targets import Target

USAGE = {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}


class Endpoint:
    """Rejects every fourth request because its queue is full."""

    def __init__(self) -> None:
        self.received: list[tuple[str, dict[str, Any], str | None]] = []
        self.ends_early = False
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["content-length"])))
        self.received.append((request.path, body, request.headers["authorization"]))
        chat = request.path == "/v1/chat/completions"
        if len(self.received) % 4 == 0:
            refusal = {"error": {"message": "the queue is full"}}
            reply(request, json.dumps(refusal).encode(), 429)
        elif request.path == "/v1/embeddings":
            vectors = [{"index": at, "embedding": "AAAA"} for at in range(len(body["input"]))]
            usage = {"prompt_tokens": 7, "total_tokens": 7}
            reply(request, json.dumps({"data": vectors, "usage": usage}).encode())
        elif body.get("stream"):
            parts = [
                {"delta": {"content": text}} if chat else {"text": text} for text in ("a b ", "c")
            ]
            last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
            events: list[Any] = [{"choices": [{**part, "finish_reason": None}]} for part in parts]
            events.append({"choices": [{**last, "finish_reason": "length"}]})
            events += [] if self.ends_early else [{"choices": [], "usage": USAGE}]
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            text += "" if self.ends_early else ": a comment\n\ndata: [DONE]\n\n"
            reply(request, text.encode())
        else:
            part = {"message": {"content": "a b c"}} if chat else {"text": "a b c"}
            choice = {**part, "finish_reason": "length"}
            reply(request, json.dumps({"choices": [choice], "usage": USAGE}).encode())


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    with http_server(endpoint.answer) as url:
        endpoint.url = f"{url}/v1"
        yield endpoint


def run_bench(endpoint: Endpoint, api: Api, *, stream: bool) -> Run:
    target = Target("demo", endpoint.url, api=api)
    load = Load(concurrency=2, requests=8, warmup=0, options={"temperature": 0.5})
    plan = Plan(Prompts(output_tokens=Lengths(8)), stream)
    return bench(target, load, plan).runs[0]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_requests_and_answers_follow_the_openai_api(
    endpoint: Endpoint, api: Api, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    run = run_bench(endpoint, api, stream=stream)
    path, body, key = endpoint.received[0]
    assert path == ("/v1/chat/completions" if api == "chat" else "/v1/completions")
    assert key == "Bearer secret"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("demo", 8, 0.5)
    assert ("messages" in body) == (api == "chat") != ("prompt" in body)
    assert body.get("stream_options") == ({"include_usage": True} if stream else None)
    assert [record.error for record in run.records].count("rejected") == 2
    assert "the queue is full" in {record.message for record in run.records}
    for record in run.good:
        assert (record.input_tokens, record.output_tokens) == (5, 8)
        assert record.finish_reason == "length"
        # The first piece counts as one token.
        assert record.tokens == ((1, 7) if stream else (8,))
    assert ("ttft_p50" in figures_of(run, Load(stream=stream))) == stream
    assert run.server is None


def test_a_chat_of_a_dataset_is_sent_with_all_its_messages(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    dataset = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Hi", "messages": messages}, {"prompt": "Once"}]
    dataset.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    load = Load(concurrency=1, requests=2, warmup=0)
    bench(Target("demo", endpoint.url, api="chat"), load, Plan(Prompts(dataset), False))
    asked = [body["messages"] for _, body, _ in endpoint.received]
    assert asked == [messages, [{"role": "user", "content": "Once"}]]


def test_each_adapter_is_a_model_and_has_a_row_of_its_own(endpoint: Endpoint) -> None:
    load = Load(concurrency=1, requests=8, warmup=0, adapters=("team/sql", ""))
    plan = Plan(Prompts(output_tokens=Lengths(8)), True)
    result = bench(Target("demo", endpoint.url, api="completions"), load, plan)
    asked = [body for _, body, _ in endpoint.received]
    assert [body["model"] for body in asked] == ["demo:team/sql", "demo"] * 4
    assert not any("adapter" in body for body in asked)
    assert [record.adapter for record in result.runs[0].records] == ["team/sql", ""] * 4
    (table,) = [table for table in tables_of(result) if table.title.startswith("By adapter")]
    assert [row[:2] for row in table.rows] == [["team/sql", "4"], ["none", "4"]]
    assert conditions_of(result)["Adapters"] == "team/sql, none"


def test_images_are_shown_in_turn_and_none_is_one_of_them(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    load = Load(concurrency=1, requests=4, warmup=0, images=(str(tmp_path / "a.png"), ""))
    target = Target("demo", endpoint.url, api="chat")
    result = bench(target, load, Plan(Prompts(output_tokens=Lengths(8)), True))
    asked = [body["messages"][-1]["content"] for _, body, _ in endpoint.received]
    assert [isinstance(content, str) for content in asked] == [False, True] * 2
    image, text = asked[0]
    assert image["image_url"]["url"] == "data:image/png;base64,cGljdHVyZQ=="
    assert text["type"] == "text"
    (table,) = [table for table in tables_of(result) if table.title.startswith("By image")]
    assert [row[:2] for row in table.rows] == [["a.png", "2"], ["none", "2"]]
    assert conditions_of(result)["Images"] == "a.png, none"


def test_a_connection_that_the_server_closes_when_it_is_used_again_is_no_failure() -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        content = request.rfile.read(int(request.headers["content-length"]))
        if hasattr(request, "is_used"):
            request.close_connection = True
            return
        request.is_used = True  # type: ignore[attr-defined]
        request.protocol_version = "HTTP/1.1"
        received.append(content)
        choice = {"text": "a", "finish_reason": "length"}
        raw = json.dumps({"choices": [choice], "usage": USAGE}).encode()
        reply(request, raw, headers={"Connection": "keep-alive"})

    received: list[bytes] = []
    load, plan = Load(concurrency=1, requests=5, warmup=0), Plan(Prompts(), stream=False)
    with http_server(answer) as url:
        run = bench(Target("demo", f"{url}/v1", api="completions"), load, plan).runs[0]
    assert (len(run.good), len(received)) == (5, 5)


def test_embeddings_are_asked_for_some_texts_at_a_time(endpoint: Endpoint) -> None:
    target, load = Target("demo", endpoint.url, api="embeddings"), Load(concurrency=2, requests=8)
    run = bench(target, replace(load, warmup=0), Plan(Prompts(), texts=3)).runs[0]
    path, body, _ = endpoint.received[0]
    assert (path, body["model"], body["encoding_format"]) == ("/v1/embeddings", "demo", "base64")
    assert len(body["input"]) == 3
    assert len({text for _, each, _ in endpoint.received for text in each["input"]}) > 12
    assert len(run.good) == 6
    assert {(record.texts, record.input_tokens) for record in run.good} == {(3, 7)}
    figures = figures_of(run, load)
    assert figures["texts_per_second"] == pytest.approx(18 / run.seconds)
    assert figures["input_tokens_per_second"] == pytest.approx(42 / run.seconds)
    assert not figures.keys() & {"output_tokens", "ttft_p50"}


@pytest.mark.parametrize(
    ("plan", "flag"),
    [
        (Plan(Prompts(), True), "--stream"),
        (Plan(Prompts(output_tokens=Lengths(8))), "--output-tokens"),
    ],
)
def test_options_of_text_are_refused_for_embeddings(plan: Plan, flag: str) -> None:
    with pytest.raises(UsageError, match="demo computes embeddings") as caught:
        bench(Target("demo", "http://127.0.0.1:9", api="embeddings"), Load(), plan)
    assert caught.value.hint == f"leave out {flag}"


def test_texts_are_refused_for_a_model_that_generates_text() -> None:
    with pytest.raises(UsageError, match="demo generates text: leave out --texts"):
        bench(Target("demo", "http://127.0.0.1:9", api="chat"), Load(), Plan(Prompts(), texts=4))


def test_a_stream_that_breaks_off_is_a_failure(endpoint: Endpoint) -> None:
    endpoint.ends_early = True
    run = run_bench(endpoint, "chat", stream=True)
    assert not run.good
    assert "the stream broke off before its end" in {record.message for record in run.records}


def test_reasoning_comes_before_the_answer_and_is_part_of_it() -> None:
    parts: Parts = []
    for name, text in (("content", None), ("reasoning_content", "hm"), ("reasoning", "so")):
        event = json.dumps({"choices": [{"delta": {name: text}}]}).encode()
        add(OpenAIApi.read_answer(event, reasoning=True), parts)
        assert not OpenAIApi.read_answer(event)[0].text, "a person who asks gets the answer"
    event = b'{"choices": [{"delta": {"content": "a", "reasoning": null}}]}'
    add(OpenAIApi.read_answer(event, reasoning=True), parts)
    assert [piece.text for _, piece in parts] == ["hm", "so", "a"]
