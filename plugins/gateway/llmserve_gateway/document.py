"""The OpenAPI document: its request bodies are what the readers of requests ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from llmserve_gateway import anthropic, responses
from llmserve_gateway.fields import MAX_ANSWERS, ROLES, Noted
from llmserve_gateway.openai_requests import read_chat, read_completion

_JSON, _EVENTS, _PLAIN = "application/json", "text/event-stream", "text/plain"
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {"function": {"type": "object", "required": ["name"], "properties": {
        "name": {"type": "string"}, "arguments": {"type": "string"}}}},
}  # fmt: skip


def _messages(roles: Sequence[str], **more: Any) -> dict[str, Any]:
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
    fields = {"role": {"enum": list(roles)}, "content": content, **more}
    message = {"type": "object", "required": ["role", "content"], "properties": fields}
    return {"type": "array", "minItems": 1, "items": message}


_MESSAGES = _messages(list(ROLES), tool_calls={"type": "array", "items": _CALL})
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXT_OR_IDS = {
    "anyOf": [_TEXT, _IDS] + [
        {"type": "array", "minItems": 1, "maxItems": MAX_ANSWERS, "items": each}
        for each in (_TEXT, _IDS)
    ]
}  # fmt: skip
# What is more than a number, a text or a switch.
_FORMS: Mapping[str, Any] = {
    "messages": _MESSAGES,
    "prompt": _TEXT_OR_IDS,
    "input": {"anyOf": [_TEXT, _messages(list(ROLES))]},
    "tokens": _IDS,
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type"]}},
}
_ASKED = [{"role": "user", "content": "Hi"}]
_EXAMPLES: Mapping[str, tuple[str, Callable[[Any], Any], dict[str, Any]]] = {
    "/v1/chat/completions": ("Answer a conversation", read_chat, {"messages": _ASKED}),
    "/v1/completions": ("Go on from a text", read_completion, {"prompt": "Hi"}),
    "/v1/responses": ("Answer a conversation, in OpenAI's newer form",
                      responses.read_response_request, {"input": "Hi"}),
    "/v1/messages": ("Answer a conversation, in Anthropic's form",
                     anthropic.read_messages_request, {"messages": _ASKED, "max_tokens": 16}),
    "/v1/messages/count_tokens": ("Count what a conversation is to the model",
                                  partial(anthropic.read_messages_request, counts=True),
                                  {"messages": _ASKED}),
}  # fmt: skip
_GETS = {
    "/v1/models": ("What can be asked", _JSON),
    "/v1/models/{name}": ("One of them", _JSON),
    "/livez": ("Whether the gateway runs", None),
    "/readyz": ("Whether models answer", _JSON),
    "/readyz/{name}": ("Whether one of them does", _JSON),
    "/health": ("As /readyz", _JSON),
    "/metrics": ("Figures for Prometheus", _PLAIN),
    "/metrics/triton": ("Triton's own", _PLAIN),
    "/openapi.json": ("This document", _JSON),
}


def make_document(models: Sequence[str]) -> dict[str, Any]:
    # No schema of the answers: they have the form that each API's own clients read.
    model = {"type": "string", "enum": list(models)} if models else {"type": "string"}
    paths: dict[str, Any] = {}
    for path, (summary, read, example) in _EXAMPLES.items():
        body = _body(read, {"model": "m", **example}, model)
        if path.startswith("/v1/messages"):
            body["properties"]["messages"] = _messages(["user", "assistant"])
        kinds = (_JSON, _EVENTS) if "stream" in body["properties"] else (_JSON,)
        paths[path] = {"post": _operation(summary, kinds, body)}
    for path, summary, taken in (("/tokenize", "The tokens of a text", ("prompt", "messages")),
                                 ("/detokenize", "The text of tokens", ("tokens",))):  # fmt: skip
        fields = {"model": model, **{name: _FORMS[name] for name in taken}}
        if path == "/tokenize":
            fields["prompt"] = {"type": "string"}
        body = {"type": "object", "required": ["model"], "properties": fields,
                "oneOf": [{"required": [name]} for name in taken]}  # fmt: skip
        paths[path] = {"post": _operation(summary, (_JSON,), body)}
    for path, (summary, kind) in _GETS.items():
        paths[path] = {"get": _operation(summary, (kind,) if kind else ())}
        if "{name}" in path:
            named = {"name": "name", "in": "path", "required": True, "schema": model}
            paths[path]["get"]["parameters"] = [named]
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmserve", "version": version("llmserve-gateway")},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _body(read: Callable[[Any], Any], example: dict[str, Any], model: Any) -> dict[str, Any]:
    noted = Noted(example)
    read(noted)
    fields = {name: _FORMS.get(name, noted.schemas[name]) for name in noted.schemas}
    return {
        "type": "object",
        "required": list(example),
        "properties": {**fields, "model": model},
    }


def _operation(summary: str, kinds: Sequence[str], body: Any = None) -> dict[str, Any]:
    failed = {"description": "A refusal or failure", "content": {_JSON: {"schema": _ERROR}}}
    found: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": summary, "content": {kind: {} for kind in kinds}},
            "4XX": failed,
            "5XX": failed,
        },
    }
    if body:
        found["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    return found
