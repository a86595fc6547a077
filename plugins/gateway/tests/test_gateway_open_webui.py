"""What Open WebUI's backend asks of a gateway, and reads of it: read in its version 0.12.4.

It is not run by the tests: with all that it needs, it takes gigabytes. Its requests are made of
what ``routers/ollama.py``, ``routers/openai.py`` and ``utils`` send, and what these read of an
answer is read here in the same way.
"""

from __future__ import annotations

import base64
import json
import re
from datetime import datetime, timezone
from typing import Any

import pytest

from .gateways import Triton, request_via
from .test_gateway_ollama import CALL, WEATHER, Embedder, Missing, Model, get, lines_of

HEADERS = {
    "content-type": "application/json",
    "x-openwebui-user-name": "Ada%20Lovelace",
    "x-openwebui-user-id": "1",
    "x-openwebui-chat-id": "2",
}
PICTURE = base64.b64encode(b"\x89PNG\r\n\x1a\n picture").decode()
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is it?", "images": [PICTURE]},
    {"role": "assistant", "content": "", "thinking": "It asks.", "tool_calls": [
        {"index": 0, "id": "call_1", "function": {"name": "get_weather",
                                                  "arguments": {"city": "Tokyo"}}}]},
    {"role": "tool", "content": "21 degrees", "tool_call_id": "call_1"},
    {"role": "user", "content": "And now?"},
]  # fmt: skip
OPTIONS = {
    "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "repeat_penalty": 1.1,
    "repeat_last_n": 64, "seed": 3, "num_predict": 32, "num_ctx": 2048, "num_batch": 512,
    "num_keep": 24, "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "tfs_z": 1,
    "use_mmap": True, "use_mlock": False, "num_thread": 2, "num_gpu": 1, "stop": ["\n\n"],
}  # fmt: skip


def post(model: Triton, path: str, body: Any, **more: Any) -> Any:
    return request_via(model, path, json=body, headers=HEADERS, **more)


def usage_of(last: Any) -> tuple[int, int, float]:
    """Return the counts and the tokens per second that it shows under an answer."""
    counts = int(last.get("prompt_eval_count", 0)), int(last.get("eval_count", 0))
    durations = ("total_duration", "load_duration", "eval_duration")
    assert all(isinstance(last.get(name, 0), int) for name in durations)
    return *counts, counts[1] / max(last.get("eval_duration", 0), 1)


def test_a_connection_is_verified_by_a_version_that_it_can_compare() -> None:
    version = get(Model(), "/api/version").json()["version"]
    assert tuple(map(int, re.sub(r"^v|-.*", "", version).split("."))) > (0, 5)


def test_models_are_found_by_one_name_in_both_lists() -> None:
    listed = {model["model"]: model for model in get(Model(), "/api/tags").json()["models"]}
    running = get(Model(), "/api/ps").json()["models"]
    for model in running:
        assert model["model"] in listed
        if "expires_at" in model:
            # It shows for how long a model stays loaded.
            until = datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", model["expires_at"]))
            assert until.tzinfo is not None
            assert until.replace(tzinfo=timezone.utc).year >= 1
    (name,) = listed
    assert post(Model(), "/api/show", {"model": name}).json()["capabilities"]


def test_a_conversation_with_all_that_it_can_send_is_answered_in_lines() -> None:
    model = Model("It is fine.")
    body = {
        "model": "m:latest", "messages": ASKED, "stream": True, "options": OPTIONS, "think": False,
        "keep_alive": "5m", "tools": [WEATHER], "metadata": {"chat_id": "2"},
    }  # fmt: skip
    lines = lines_of(post(model, "/api/chat", body))
    assert "".join(line["message"]["content"] for line in lines) == "It is fine."
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["done_reason"] == "stop"
    assert usage_of(lines[-1])[:2] == (2, 3)
    (asked,) = model.requests
    assert (asked["temperature"], asked["seed"], asked["max_tokens"]) == (0.5, 3, 32)
    assert asked["image_url"] == [f"data:image/png;base64,{PICTURE}"]
    read = json.dumps(asked["messages"])
    assert all(part in read for part in ("Be brief.", "What is it?", "Tokyo", "21 degrees", "now"))


def test_a_call_has_arguments_that_it_can_write_as_json() -> None:
    body = {"model": "m:latest", "messages": ASKED[:2], "stream": True, "tools": [WEATHER]}
    lines = lines_of(post(Model(CALL), "/api/chat", body))
    calls = [call for line in lines for call in line["message"].get("tool_calls") or ()]
    assert [call["function"]["name"] for call in calls] == ["get_weather"]
    assert json.loads(json.dumps(calls[0]["function"]["arguments"])) == {"city": "Tokyo"}


def test_titles_are_asked_for_whole() -> None:
    """Titles, tags and queries of a search: short, without a stream, in a form perhaps."""
    form = {"type": "object", "properties": {"title": {"type": "string"}}}
    body = {
        "model": "m:latest", "messages": ASKED[:1] + ASKED[-1:], "stream": False,
        "options": {"num_predict": 1000}, "format": form,
    }  # fmt: skip
    model = Model('{"title": "Weather"}')
    said = post(model, "/api/chat", body).json()
    assert json.loads(said["message"]["content"]) == {"title": "Weather"}
    assert usage_of(said)[:2] == (2, 3)
    assert json.loads(model.requests[0]["json_schema"]) == form


def test_a_model_that_stays_loaded_says_that_it_cannot_be_unloaded() -> None:
    answer = post(Model(), "/api/generate", {"model": "m:latest", "keep_alive": 0, "prompt": ""})
    assert answer.status_code == 400
    assert "--on-demand" in answer.json()["error"]


@pytest.mark.parametrize(
    "body", [{"input": ["a", "b"]}, {"input": "a"}, {"input": ["a"], "truncate": True}]
)
def test_texts_of_documents_are_embedded(body: Any) -> None:
    said = post(Embedder(), "/api/embed", {"model": "m", **body}).json()
    count = len(body["input"]) if isinstance(body["input"], list) else 1
    assert said["embeddings"] == [[0.5, 0.5]] * count
    # The older path gets both names of a text.
    old = {"model": "m", "prompt": "a", "input": ["a"]}
    assert post(Embedder(), "/api/embeddings", old).json()["embedding"] == [0.5, 0.5]


def test_an_error_is_shown_in_the_servers_words() -> None:
    answer = post(Missing(), "/api/chat", {"model": "none", "messages": ASKED[:1]})
    assert answer.status_code == 404
    assert isinstance(answer.json()["error"], str)
    chat = post(Missing(), "/v1/chat/completions", {"model": "none", "messages": ASKED[:1]})
    assert chat.status_code == 404
    assert chat.json()["error"]["message"]


# The same as a server of OpenAI's API


def test_models_of_the_other_api_have_ids() -> None:
    said = get(Model(), "/v1/models").json()
    assert "error" not in said
    assert [model["id"] for model in said["data"]] == ["m"]


def test_a_streamed_chat_has_its_usage_at_the_end() -> None:
    body = {
        "model": "m", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8,
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "What is it?"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}]}],
        "frequency_penalty": 0.1, "presence_penalty": 0.1, "seed": 3, "stop": ["\n\n"],
        "logit_bias": {"5": -100}, "reasoning_effort": "low", "tools": [WEATHER],
    }  # fmt: skip
    answer = post(Model("It is fine."), "/v1/chat/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(each) for each in data[:-1]]
    texts = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    assert "".join(texts) == "It is fine."
    assert chunks[-1]["usage"]["prompt_tokens"] == 2
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_continue_goes_on_with_the_last_message() -> None:
    begun = [*ASKED[-1:], {"role": "assistant", "content": "It is"}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    model = Model(" fine.")
    said = post(model, "/v1/chat/completions", {"model": "m", "messages": begun, **flags}).json()
    assert said["choices"][0]["message"]["content"] == " fine."
    assert model.requests[0]["chat_template_kwargs"]["continue_final_message"] is True
