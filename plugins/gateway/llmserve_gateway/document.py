"""The OpenAPI document; its request schemas come from the code that reads requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from llmserve.client import BATCH_ENDPOINTS
from llmserve_gateway import anthropic, responses
from llmserve_gateway.fields import MAX_ANSWERS, ROLES, SchemaProbe
from llmserve_gateway.openai_requests import read_chat, read_completion
from llmserve_gateway.value_requests import (
    SCORE_NAMES,
    TEXT_OR_TEXTS,
    read_classify,
    read_cohere_rerank,
    read_embeddings,
    read_rerank,
    read_score,
    read_tei_embed,
)

_JSON, _EVENT_STREAM, _TEXT_PLAIN = "application/json", "text/event-stream", "text/plain"
# Each API has its own types of parts: text, input_text, tool_use.
_PART = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string"}, "text": {"type": "string"}},
}
_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {"function": {"type": "object", "required": ["name"], "properties": {
        "name": {"type": "string"}, "arguments": {"type": "string"}}}},
}  # fmt: skip


_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}


def _list_of(*items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": {"anyOf": [*items]}}


def _message(
    *, required: Sequence[str], content: Any, roles: Sequence[str] = tuple(ROLES), **more: Any
) -> dict[str, Any]:
    fields = {"role": {"enum": list(roles)}, "content": content, **more}
    return {"type": "object", "required": ["role", *required], "properties": fields}


def _item(kind: str, **fields: Any) -> dict[str, Any]:
    fields = {"type": {"const": kind}, "call_id": {"type": "string"}, **fields}
    return {"type": "object", "required": [*fields], "properties": fields}


# A message of the assistant that only calls functions has no content.
_MESSAGES = _list_of(
    _message(required=["content"], content=_CONTENT),
    _message(
        required=["tool_calls"],
        content={"anyOf": [_CONTENT, {"type": "null"}]},
        tool_calls={"type": "array", "minItems": 1, "items": _CALL},
    ),
)
_ANTHROPIC_MESSAGES = _list_of(
    _message(required=["content"], content=_CONTENT, roles=["user", "assistant"])
)
_ITEMS = _list_of(
    _message(required=["content"], content=_CONTENT),
    _item("function_call", name={"type": "string"}, arguments={"type": "string"}),
    _item("function_call_output", output=_CONTENT),
)
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXT_OR_IDS = {
    "anyOf": [_TEXT, _IDS] + [
        {"type": "array", "minItems": 1, "maxItems": MAX_ANSWERS, "items": item}
        for item in (_TEXT, _IDS)
    ]
}  # fmt: skip
# The fields with more structure than a number, a string or a boolean.
_SCHEMAS: Mapping[str, Any] = {
    "messages": _MESSAGES,
    "prompt": _TEXT_OR_IDS,
    "tokens": _IDS,
}
_OWN_SCHEMAS: Mapping[str, Any] = {
    "/v1/messages": {"messages": _ANTHROPIC_MESSAGES},
    "/v1/messages/count_tokens": {"messages": _ANTHROPIC_MESSAGES},
    "/v1/responses": {"input": {"anyOf": [_TEXT, _ITEMS]}},
    "/v1/responses/input_tokens": {"input": {"anyOf": [_TEXT, _ITEMS]}},
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type"]}},
}
_EXAMPLE = [{"role": "user", "content": "Hi"}]
_RANKING = {"query": "Hi", "documents": ["Hello"]}
_PAIR = {"text_1": "Hi", "text_2": "Hello"}
_EXAMPLES: Mapping[str, tuple[str, Callable[[Any], Any], dict[str, Any]]] = {
    "/v1/chat/completions": ("Answer a conversation", read_chat, {"messages": _EXAMPLE}),
    "/v1/completions": ("Continue a text", read_completion, {"prompt": "Hi"}),
    "/v1/responses": ("Answer a conversation, in OpenAI's newer format",
                      responses.read_response_request, {"input": "Hi"}),
    "/v1/responses/input_tokens": ("Count the tokens of a conversation, in that format",
                                   responses.read_response_request, {"input": "Hi"}),
    "/v1/messages": ("Answer a conversation, in Anthropic's format",
                     anthropic.read_messages_request, {"messages": _EXAMPLE, "max_tokens": 16}),
    "/v1/messages/count_tokens": ("Count the tokens of a conversation",
                                  partial(anthropic.read_messages_request, count_only=True),
                                  {"messages": _EXAMPLE}),
    "/v1/embeddings": ("The embeddings of texts", read_embeddings, {"input": "Hi"}),
    "/embed": ("The embeddings of texts, as Hugging Face's text-embeddings-inference does",
               read_tei_embed, {"inputs": "Hi"}),
    "/v1/rerank": ("Documents ranked by a query, as Jina's API does", read_rerank, _RANKING),
    "/v2/rerank": ("Documents ranked by a query, as Cohere's API does",
                   read_cohere_rerank, _RANKING),
    "/rerank": ("Same as /v1/rerank", read_rerank, _RANKING),
    "/v1/score": ("How well texts answer others, as in vLLM", read_score, _PAIR),
    "/score": ("Same as /v1/score", read_score, _PAIR),
    "/classify": ("The labels of texts, as in vLLM", read_classify, {"input": "Hi"}),
}  # fmt: skip
_ORDERS = {
    "/models/load": "Load a model now, if models are loaded on demand",
    "/models/unload": "Unload a model until it is needed, if models are loaded on demand",
}
_GETS = {
    "/v1/models": ("The available models", _JSON),
    "/v1/models/{name}": ("One model", _JSON),
    "/tokenizer_info": ("The special tokens and the chat template of a model", _JSON),
    "/livez": ("Whether the gateway is running", None),
    "/readyz": ("Whether the models answer", _JSON),
    "/readyz/{name}": ("Whether one model answers", _JSON),
    "/health": ("Same as /readyz", _JSON),
    "/metrics": ("Metrics for Prometheus", _TEXT_PLAIN),
    "/metrics/triton": ("Triton's own metrics", _TEXT_PLAIN),
    "/openapi.json": ("This document", _JSON),
}

_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
}
_NEW_BATCH = {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "properties": {
        "input_file_id": {"type": "string"},
        "endpoint": {"enum": list(BATCH_ENDPOINTS)},
        "completion_window": {"type": "string", "pattern": "^[1-9][0-9]*[mhd]$"},
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
        "output_expires_after": {"type": "object"},
    },
}


def make_document(models: Sequence[str], *, batches: bool = False) -> dict[str, Any]:
    # No response schemas: responses have the format that each API's own clients expect.
    model = {"type": "string", "enum": list(models)} if models else {"type": "string"}
    paths: dict[str, Any] = {}
    for path, (summary, read, example) in _EXAMPLES.items():
        schemas = {**_SCHEMAS, **_OWN_SCHEMAS.get(path, {})}
        body = _body(read, {"model": "m", **example}, model, schemas)
        if read is read_score:
            body |= {
                "required": ["model"],
                "anyOf": [{"required": [*pair]} for pair in SCORE_NAMES],
            }
            texts = {name: TEXT_OR_TEXTS for pair in SCORE_NAMES for name in pair}
            body["properties"] = {**texts, **body["properties"]}
        types = (_JSON, _EVENT_STREAM) if "stream" in body["properties"] else (_JSON,)
        paths[path] = {"post": _operation(summary, types, body)}
    for path, summary, names in (("/tokenize", "The tokens of a text", ("prompt", "messages")),
                                 ("/detokenize", "The text of tokens", ("tokens",))):  # fmt: skip
        fields = {"model": model, **{name: _SCHEMAS[name] for name in names}}
        if path == "/tokenize":
            fields["prompt"] = {"type": "string"}
        body = {"type": "object", "required": ["model"], "properties": fields,
                "oneOf": [{"required": [name]} for name in names]}  # fmt: skip
        paths[path] = {"post": _operation(summary, (_JSON,), body)}
    for path, summary in _ORDERS.items():
        body = {"type": "object", "required": ["model"], "properties": {"model": model}}
        paths[path] = {"post": _operation(summary, (_JSON,), body)}
    for path, (summary, media_type) in _GETS.items():
        paths[path] = {"get": _operation(summary, (media_type,) if media_type else ())}
        if "{name}" in path:
            parameter = {"name": "name", "in": "path", "required": True, "schema": model}
            paths[path]["get"]["parameters"] = [parameter]
    if batches:
        paths |= _batch_paths()
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmserve", "version": version("llmserve-gateway")},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _batch_paths() -> dict[str, Any]:
    """The paths of files and batches, which a gateway may not have."""
    upload = _operation("Upload a file of requests", (_JSON,), _FORM)
    upload["requestBody"]["content"] = {"multipart/form-data": {"schema": _FORM}}
    paths: dict[str, Any] = {
        "/v1/files": {"get": _operation("The files of this key", (_JSON,)), "post": upload},
        "/v1/files/{id}": {
            "get": _operation("One file", (_JSON,)),
            "delete": _operation("Delete a file", (_JSON,)),
        },
        "/v1/files/{id}/content": {
            "get": _operation("What a file says", ("application/octet-stream",))
        },
        "/v1/batches": {
            "get": _operation("The batches of this key", (_JSON,)),
            "post": _operation("Answer a file of requests", (_JSON,), _NEW_BATCH),
        },
        "/v1/batches/{id}": {"get": _operation("One batch", (_JSON,))},
        "/v1/batches/{id}/cancel": {"post": _operation("Cancel a batch", (_JSON,))},
    }
    parameter = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    for path, operations in paths.items():
        for operation in operations.values() if "{id}" in path else ():
            operation["parameters"] = [parameter]
    return paths


def _body(
    read: Callable[[Any], Any], example: dict[str, Any], model: Any, schemas: Mapping[str, Any]
) -> dict[str, Any]:
    probe = SchemaProbe(example)
    read(probe)
    fields = {name: schemas.get(name, probe.schemas[name]) for name in probe.schemas}
    return {
        "type": "object",
        "required": list(example),
        "properties": {**fields, "model": model},
    }


def _operation(summary: str, media_types: Sequence[str], body: Any = None) -> dict[str, Any]:
    error = {"description": "A refusal or failure", "content": {_JSON: {"schema": _ERROR}}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": summary, "content": {name: {} for name in media_types}},
            "4XX": error,
            "5XX": error,
        },
    }
    if body:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    return operation
