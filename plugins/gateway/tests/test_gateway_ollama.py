"""Ollama's API: what its clients send and read, as its version 0.33 has it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.client import Completion, Computed, Logprob, ModelInfo, Piece
from llmserve.errors import ModelNotReadyError, RequestTimeoutError
from llmserve_gateway.endpoints import OF_OLLAMA
from llmserve_gateway.errors import ApiError
from llmserve_gateway.gateway import Settings
from llmserve_gateway.keys import new_key
from llmserve_gateway.ollama import VERSION, ChatWriter, TextWriter, line
from llmserve_gateway.ollama_requests import read_chat, read_text
from llmserve_gateway.reply import RequestRecord
from llmserve_gateway.text_requests import ParsedRequest, Thinking

from .gateways import NO_TRITON, Triton, app_before, ask, request_via

HI = [{"role": "user", "content": "Hi"}]
CHAT: Any = {"model": "m", "messages": HI}
TEXT: Any = {"model": "m", "prompt": "Hi"}
PICTURE = base64.b64encode(b"\x89PNG\r\n\x1a\n picture").decode()
SHOWN = f"data:image/png;base64,{PICTURE}"
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Look up the weather.",
    "parameters": {"type": "object", "required": ["city"],
                   "properties": {"city": {"type": "string"}}}}}  # fmt: skip
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Tokyo"}}</tool_call>'
FINAL = {"total_duration", "load_duration", "prompt_eval_count", "eval_count", "eval_duration"}


class Model(Triton):
    """A model with a chat template, unless it has none, that says what it is told to."""

    def __init__(self, text: str = "x", template: str | None = "{{ tools }}{{ messages }}") -> None:
        super().__init__()
        self.text, self.template = text, template
        self.prompts: list[str] = []
        self.error: Exception | None = None
        self.reason = "stop"

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        info = await super().model(name, refresh=refresh)
        more: Any = {"messages": None, "image_url": None}
        return replace(info, inputs={**info.inputs, **more})

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        if options.get("prompt_only"):
            about = {"ids": [], "text": "", "context_length": 512, "chat_template": self.template}
            return Completion(json.dumps(about), "stop", 0, 0)
        self.requests.append(options)
        self.prompts.append(prompt)
        logprobs = (Logprob(1, "x", -0.5),) if "logprobs" in options else None
        return Completion(self.text, self.reason, 2, 3, logprobs=logprobs)

    async def stream(self, name: str, prompt: str, **options: Any) -> AsyncIterator[Piece]:
        answer = await self.generate(name, prompt, **options)
        half = len(answer.text) // 2
        yield Piece(answer.text[:half], input_tokens=2, output_tokens=1)
        if self.error:
            raise self.error
        yield Piece(answer.text[half:], input_tokens=2, output_tokens=3)
        yield Piece("", finish_reason=self.reason)


class Missing(Model):
    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        if name == "m":
            return await super().model(name, refresh=refresh)
        raise ModelNotReadyError(f"there is no model {name!r}")


class Embedder(Model):
    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        info = await super().model(name, refresh=refresh)
        more: Any = {"truncate": None}
        return replace(info, task="embed", inputs={**info.inputs, **more})

    async def compute(self, name: str, texts: Any, **options: Any) -> Computed:
        self.requests.append({"texts": texts, **options})
        vectors = np.full((len(texts), 2), 0.5, np.float32)
        return Computed({"embedding": vectors}, (2,) * len(texts))

    @property
    def all(self) -> list[Any]:
        return [self]


def lines_of(answer: Any) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    # As Python's client reads it, which takes more for an end of a line than "\n".
    return [json.loads(each) for each in answer.text.splitlines()]


@pytest.mark.parametrize(
    ("path", "body", "text_of"),
    [("/api/chat", CHAT, lambda each: each["message"]["content"]),
     ("/api/generate", TEXT, lambda each: each["response"])],
)  # fmt: skip
def test_an_answer_is_whole_or_in_lines_with_its_counts_at_the_end(
    path: str, body: Any, text_of: Any
) -> None:
    text = 'One\nline\r\n{"done":true}\n\x85two\u2028three\u2029\x0b\x1e🙂'
    whole = request_via(Model(text), path, json={**body, "stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert text_of(whole.json()) == text
    *pieces, last = lines_of(request_via(Model(text), path, json=body))
    assert len(pieces) > 1
    assert "".join(map(text_of, pieces)) == text
    assert text_of(last) == ""
    for end in (whole.json(), last):
        assert (end["model"], end["done"], end["done_reason"]) == ("m", True, "stop")
        assert (end["prompt_eval_count"], end["eval_count"]) == (2, 3)
        assert end.keys() >= FINAL
        assert all(end[name] > 0 for name in FINAL)
        assert end["total_duration"] >= end["load_duration"] + end["eval_duration"]
    for piece in pieces:
        assert piece["done"] is False
        assert not FINAL & piece.keys()
        assert piece["created_at"].endswith("Z")


@given(st.text())
def test_no_text_makes_a_line_of_its_own(text: str) -> None:
    data = line({"response": text})
    decoded = data.decode()
    assert decoded.splitlines() == [decoded[:-1]]
    assert json.loads(decoded)["response"] == text.encode(errors="replace").decode()


OPTIONS: list[tuple[Any, Mapping[str, Any]]] = [
    ({"options": {"num_predict": 7, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1,
                  "seed": 3, "stop": ["a"], "repeat_penalty": 1.1}},
     {"max_tokens": 7, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 3,
      "stop_words": ["a"], "repetition_penalty": 1.1}),
    ({"options": {"presence_penalty": 0.5, "frequency_penalty": 0.25}},
     {"presence_penalty": 0.5, "frequency_penalty": 0.25}),
    ({"options": {"num_predict": -1, "seed": -1, "top_k": 0, "temperature": 3}},
     {"temperature": 3}),
    ({"options": {"num_predict": 8.0, "num_ctx": 4096, "num_gpu": 1, "mirostat": 2}},
     {"max_tokens": 8}),
    ({"options": {}, "keep_alive": "5m", "truncate": True, "shift": False}, {}),
    ({"options": None, "keep_alive": -1, "format": "", "think": None}, {}),
    ({"format": "json"}, {"json_object": True}),
    ({"format": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
    ({"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"top_logprobs": 2}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "options"), OPTIONS)
def test_what_is_sent_are_options_of_the_model(sent: Any, options: Any) -> None:
    parsed = read_chat({**CHAT, **sent})
    assert parsed.options == {"messages": HI, **options}
    text = read_text({**TEXT, **sent})
    assert text.options == {"messages": HI, **options}
    assert parsed.stream
    assert text.stream


def test_unknown_options_are_ignored_by_name() -> None:
    read = read_chat({**CHAT, "options": {"mirostat": 2, "num_thread": 4}, "poem": 1})
    assert read.unknown == {"poem", "options.mirostat"}


THINKING = [(True, Thinking(True, required_by="think")), (False, Thinking(False)),
            ("low", Thinking(True, effort="low", required_by="think")),
            (None, Thinking())]  # fmt: skip


@pytest.mark.parametrize(("think", "meant"), THINKING)
def test_a_model_is_told_whether_to_think(think: Any, meant: Thinking) -> None:
    assert read_chat({**CHAT, "think": think}).thinking == meant
    assert read_text({**TEXT, "think": think}).thinking == meant


REFUSED: list[tuple[str, Any, str]] = [
    ("/api/chat", {"options": {"num_predict": "7"}}, "num_predict must be an integer"),
    ("/api/chat", {"options": {"temperature": "hot"}}, "temperature must be a number"),
    ("/api/chat", {"options": []}, "options must be an object"),
    ("/api/chat", {"format": "yaml"}, 'format must be "json" or a JSON schema'),
    ("/api/chat", {"think": "hard"}, "think must be true, false, high"),
    ("/api/chat", {"think": True}, "think: 'm' does not think"),
    ("/api/chat", {"keep_alive": "soon"}, "keep_alive must be seconds"),
    ("/api/chat", {"keep_alive": "1.2.3s"}, "keep_alive must be seconds"),
    ("/api/chat", {"keep_alive": 1e300}, "keep_alive must be seconds"),
    ("/api/chat", {"keep_alive": 0, "messages": []}, "keeps its models loaded"),
    ("/api/chat", {"stream": "no"}, "stream must be true or false"),
    ("/api/chat", {"messages": "Hi"}, "messages must be a list"),
    ("/api/chat", {"messages": [{"role": "poet", "content": "Hi"}]}, "messages[0].role"),
    ("/api/chat", {"messages": [{"role": "user", "images": ["http://a/b.png"]}]},
     "messages[0].images[0] must be an image in base64"),
    ("/api/chat", {"tools": [{"type": "function"}]}, "tools[0]"),
    ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
    ("/api/generate", {"suffix": "}"}, "suffix"),
    ("/api/generate", {"context": [1, 2]}, "context: send the conversation to /api/chat"),
    ("/api/generate", {"raw": True, "system": "You help."}, "system: raw is a prompt"),
    ("/api/generate", {"images": ["?"]}, "images[0] must be an image in base64"),
    ("/api/generate", {"prompt": 5}, "prompt must be a string"),
    ("/api/generate", {"model": ""}, "model must be a non-empty string"),
    ("/api/embed", {"input": 5}, "input must be a string or a list"),
    ("/api/embed", {}, "input"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "what"), REFUSED)
def test_what_cannot_be_done_is_refused_in_its_format(path: str, body: Any, what: str) -> None:
    smallest: Mapping[str, Any] = {"/api/chat": CHAT, "/api/generate": TEXT}.get(
        path, {"model": "m"}
    )
    answer = request_via(Model(), path, json={**smallest, **body})
    assert answer.status_code == 400
    assert answer.json().keys() == {"error"}
    assert what in answer.json()["error"]


def test_latest_is_the_model_itself() -> None:
    for path, body in (("/api/chat", CHAT), ("/api/generate", TEXT)):
        answer = request_via(Model(), path, json={**body, "model": "m:latest", "stream": False})
        assert answer.json()["model"] == "m:latest"
    triton = Model()
    aliased = Settings(NO_TRITON, aliases={"qwen3:0.6b": "m"})
    body = {**CHAT, "model": "qwen3:0.6b", "stream": False}
    assert request_via(triton, "/api/chat", settings=aliased, json=body).json()["done"]
    missing = request_via(Missing(), "/api/chat", json={**CHAT, "model": "other:latest"})
    assert missing.status_code == 404
    assert "'other'" in missing.json()["error"]


def test_a_prompt_is_a_turn_unless_it_is_raw_or_the_model_has_no_template() -> None:
    triton, bare = Model(), Model(template=None)
    body = {**TEXT, "system": "You help.", "stream": False}
    request_via(triton, "/api/generate", json=body)
    assert triton.requests[0]["messages"] == [{"role": "system", "content": "You help."}, *HI]
    request_via(triton, "/api/generate", json={**TEXT, "raw": True, "stream": False})
    assert "messages" not in triton.requests[1]
    request_via(bare, "/api/generate", json=body)
    assert "messages" not in bare.requests[0]
    assert [*triton.prompts, *bare.prompts] == ["", "Hi", "You help.\n\nHi"]


@pytest.mark.parametrize("sent", [{"messages": []}, {}, {"messages": [], "keep_alive": "1h"}])
def test_a_request_without_a_turn_only_has_the_model_loaded(sent: Any) -> None:
    for path, name in (("/api/chat", "message"), ("/api/generate", "response")):
        triton = Model()
        answer = request_via(triton, path, json={"model": "m", **sent})
        assert (answer.json()["done"], answer.json()["done_reason"]) == (True, "load")
        assert name in answer.json()
        assert not triton.requests


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(0, 0), ("0", 0), ("0s", 0), (-1, -1), ("-1m", -60), ("5m", 300), ("1h30m", 5400), (2.5, 2.5),
     ("1500ms", 1.5), ("300", 300)],
)  # fmt: skip
def test_how_long_a_model_is_kept_is_read_as_ollama_does(given: Any, seconds: float) -> None:
    assert read_chat({**CHAT, "keep_alive": given}).keep == seconds
    assert read_chat({**CHAT, "messages": [], "keep_alive": given}).unloads == (seconds == 0)
    assert read_chat(CHAT).keep is None


def test_images_reach_the_model_in_turns_and_prompts() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "Hi"}]
    seen = {"messages": [{"role": "user", "content": parts}], "image_url": [SHOWN]}
    chat = read_chat({"model": "m", "messages": [{**HI[0], "images": [PICTURE]}]})
    text = read_text({**TEXT, "images": [PICTURE]})
    assert chat.options == text.options == seen
    jpeg = base64.b64encode(b"\xff\xd8\xff\xe0").decode()
    (url,) = read_text({**TEXT, "images": [jpeg]}).options["image_url"]
    assert url.startswith("data:image/jpeg;")


def test_calls_and_their_results_have_ids_that_templates_ask_for() -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Tokyo"}}}
    said = {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call, call]}
    results = [{"role": "tool", "tool_name": "get_weather", "content": text} for text in "ab"]
    messages = read_chat({"model": "m", "messages": [*HI, said, *results]}).options["messages"]
    assert messages[1]["reasoning_content"] == "Hm."
    ids = [each["id"] for each in messages[1]["tool_calls"]]
    assert ids == ["call00001", "call00002"]
    assert [(each["tool_call_id"], each["name"]) for each in messages[2:]] == [
        (id, "get_weather") for id in ids
    ]


def test_a_last_message_of_the_assistant_is_continued() -> None:
    begun = [*HI, {"role": "assistant", "content": "Hel"}]
    kwargs = read_chat({"model": "m", "messages": begun}).options["chat_template_kwargs"]
    assert kwargs == {"add_generation_prompt": False, "continue_final_message": True}


def test_a_call_is_sent_whole() -> None:
    body = {**CHAT, "tools": [WEATHER]}
    whole = request_via(Model(CALL), "/api/chat", json={**body, "stream": False}).json()
    *pieces, last = lines_of(request_via(Model(f"See.{CALL}"), "/api/chat", json=body))
    for message in (whole["message"], pieces[-1]["message"]):
        (call,) = message["tool_calls"]
        assert call["function"] == {
            "index": 0, "name": "get_weather", "arguments": {"city": "Tokyo"},
        }  # fmt: skip
        assert len(call["id"]) == 9
    assert "".join(piece["message"]["content"] for piece in pieces) == "See."
    assert whole["done_reason"] == last["done_reason"] == "stop"


def test_a_call_that_is_cut_is_text() -> None:
    triton = Model(CALL[:-30])
    triton.reason = "length"
    *pieces, last = lines_of(request_via(triton, "/api/chat", json={**CHAT, "tools": [WEATHER]}))
    assert last["done_reason"] == "length"
    assert not any("tool_calls" in piece["message"] for piece in pieces)


def test_thoughts_are_apart() -> None:
    for writer, inner in ((ChatWriter, "message"), (TextWriter, None)):
        writing = writer(ParsedRequest("m", {}), RequestRecord("x"))
        piece = json.loads(writing.chunk(Piece("", reasoning="Hm.")))
        whole = json.loads(writing.whole([Completion("Yes.", "stop", reasoning="Hm.")]))
        for each in (piece, whole):
            assert (each[inner] if inner else each)["thinking"] == "Hm."


def test_log_probabilities_are_beside_the_text() -> None:
    body = {**CHAT, "logprobs": True, "stream": False}
    answer = request_via(Model(), "/api/chat", json=body).json()
    (token,) = answer["logprobs"]
    assert (token["token"], token["logprob"]) == ("x", -0.5)


def test_a_failure_is_a_status_or_the_last_line() -> None:
    triton = Model("text")
    triton.error = RequestTimeoutError("too slow")
    first, last = lines_of(request_via(triton, "/api/chat", json=CHAT))
    assert first["message"]["content"] == "te"
    assert last.keys() == {"error"}
    assert "too slow" in last["error"]


def test_the_keys_are_those_of_the_gateway(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = new_key(path, "a")
    settings = Settings(NO_TRITON, keys=path)
    bodies: list[tuple[str, str, Any]] = [
        ("POST", "/api/chat", CHAT), ("POST", "/api/generate", TEXT),
        ("POST", "/api/embed", {"model": "m", "input": "a"}),
        *((row.method, row.path, {"model": "m"}) for row in OF_OLLAMA),
    ]  # fmt: skip
    for method, where, body in bodies:
        answer = ask(settings, method, where, json=body)
        assert answer.status_code == 401, where
        assert isinstance(answer.json()["error"], str), where
    headers = {"authorization": f"Bearer {key}"}
    answer = request_via(
        Model(), "/api/chat", settings=settings, json={**CHAT, "stream": False}, headers=headers
    )
    assert answer.json()["message"]["content"] == "x"


def test_embeddings_of_texts_are_cut_unless_a_request_says_otherwise() -> None:
    triton = Embedder()
    answer = request_via(triton, "/api/embed", json={"model": "m:latest", "input": ["a", "b"]})
    content = answer.json()
    assert content["embeddings"] == [[0.5, 0.5], [0.5, 0.5]]
    assert (content["model"], content["prompt_eval_count"]) == ("m:latest", 4)
    assert content["total_duration"] >= content["load_duration"] > 0
    request_via(triton, "/api/embed", json={"model": "m", "input": "a", "truncate": False})
    asked = [bool(request.get("truncate")) for request in triton.requests]
    assert asked == [True, False]
    request_via(triton, "/api/embed", json={"model": "m", "input": "a", "dimensions": 1})
    assert triton.requests[-1]["dimensions"] == 1
    older = request_via(triton, "/api/embeddings", json={"model": "m", "prompt": "a"})
    assert older.json() == {"embedding": [0.5, 0.5]}


def get(triton: Any, path: str, method: str = "GET", **request: Any) -> Any:
    async def go() -> Any:
        transport = httpx.ASGITransport(app=app_before(triton))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.request(method, path, **request)

    return asyncio.run(go())


def test_the_models_are_listed_and_described() -> None:
    (model,) = get(Model(), "/api/tags").json()["models"]
    assert model["name"] == model["model"] == "m:latest"
    assert len(model["digest"]) == 64
    (running,) = get(Model(), "/api/ps").json()["models"]
    assert (running["name"], running["context_length"]) == ("m:latest", 512)
    shown = request_via(Model(), "/api/show", json={"model": "m:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools", "vision"]
    assert shown["template"] == "{{ tools }}{{ messages }}"
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 512
    assert shown["details"]["family"] == family
    assert request_via(Model(), "/api/show", json={"name": "m"}).json() == shown
    embedder = request_via(Embedder(), "/api/show", json={"model": "m"}).json()
    assert embedder["capabilities"] == ["embedding"]
    assert get(Model(), "/api/version").json() == {"version": VERSION}
    for path in ("/api/version", "/api/tags", "/"):
        assert get(Model(), path, "HEAD").status_code == 200


def test_a_pull_says_what_to_do() -> None:
    here = request_via(Model(), "/api/pull", json={"model": "m:latest"})
    assert here.json() == {"status": "success"}
    other = request_via(Model(), "/api/pull", json={"model": "qwen3:0.6b"})
    assert other.status_code == 404
    assert "llmserve build --model OWNER/NAME" in other.json()["error"]
    nameless = request_via(Model(), "/api/pull", json={})
    assert nameless.status_code == 400
    assert "model" in nameless.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "command"),
    [("POST", "/api/create", "build"), ("POST", "/api/copy", "build"),
     ("DELETE", "/api/delete", "remove"), ("POST", "/api/blobs/sha256:1", "build")],
)  # fmt: skip
def test_what_no_request_does_names_the_command(method: str, path: str, command: str) -> None:
    answer = get(Model(), path, method)
    assert answer.status_code in (404, 405)
    assert f"llmserve {command}" in answer.json()["error"]


def test_an_error_of_this_api_is_read_by_its_clients() -> None:
    assert json.loads(ApiError(400, "no").json())["error"]["message"] == "no"
    answer = get(Model(), "/api/nothing")
    assert answer.status_code == 404
    assert isinstance(answer.json()["error"], str)
