"""An OpenAI endpoint under load: a small server answers as OpenAI's API does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from llmserve_bench.figures import figures_of
from llmserve_bench.measure import Plan, bench
from llmserve_bench.prompts import Lengths, Prompts
from llmserve_bench.results import Load, Run
from llmserve_bench.senders import Api
from llmserve_bench.targets import Target

USAGE = {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}


class Endpoint(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[tuple[str, dict[str, Any], str | None]] = []
        self.breaks_off = False
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.received.append((self.path, body, self.headers["authorization"]))
        chat = self.path == "/v1/chat/completions"
        if body["model"] != "demo":
            self.answer(404, {"error": {"message": "there is no such model"}})
        elif len(self.server.received) % 4 == 0:
            self.answer(429, {"error": {"message": "the queue is full"}})
        elif body.get("stream"):
            self.send_response(200)
            self.send_header("connection", "close")
            self.end_headers()
            for text, reason in (("a b ", None), ("c", None), ("", "length")):
                part = {"delta": {"content": text}} if chat else {"text": text}
                self.event({"choices": [{**part, "finish_reason": reason}]})
            if not self.server.breaks_off:
                self.event({"choices": [], "usage": USAGE})
                self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")
        else:
            part = {"message": {"content": "a b c"}} if chat else {"text": "a b c"}
            choice = {**part, "finish_reason": "length"}
            self.answer(200, {"choices": [choice], "usage": USAGE})

    def event(self, content: Any) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def answer(self, status: int, content: Any) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def measured(endpoint: Endpoint, api: Api, *, stream: bool, model: str = "demo") -> Run:
    target = Target(model, endpoint.url, api=api)
    load = Load(concurrency=2, requests=8, warmup=0, options={"temperature": 0.5})
    plan = Plan(Prompts(output_tokens=Lengths(8)), stream)
    return bench(target, load, plan).runs[0]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_requests_and_answers_are_of_openai_s_form(
    endpoint: Endpoint, api: Api, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    run = measured(endpoint, api, stream=stream)
    path, body, key = endpoint.received[0]
    assert path == ("/v1/chat/completions" if api == "chat" else "/v1/completions")
    assert key == "Bearer secret"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("demo", 8, 0.5)
    assert ("messages" in body) == (api == "chat") != ("prompt" in body)
    assert body.get("stream_options") == ({"include_usage": True} if stream else None)
    assert [record.error for record in run.records].count("rejected") == 2
    assert "HTTP 429: the queue is full" in {record.message for record in run.records}
    for record in run.good:
        assert (record.input_tokens, record.output_tokens) == (5, 8)
        assert record.finish_reason == "length"
        # The first piece is taken for one token.
        assert record.tokens == ((1, 7) if stream else (8,))
    assert ("ttft_p50" in figures_of(run, Load(stream=stream))) == stream
    assert run.server is None


def test_a_stream_that_breaks_off_is_a_failure(endpoint: Endpoint) -> None:
    endpoint.breaks_off = True
    run = measured(endpoint, "chat", stream=True)
    assert not run.good
    assert "the stream broke off before its end" in {record.message for record in run.records}
