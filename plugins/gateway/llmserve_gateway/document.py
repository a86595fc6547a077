"""The OpenAPI document, which says of each endpoint what its row says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from llmserve_gateway.endpoints import (
    ASKED,
    JSON,
    OF_BATCHES,
    OF_CONVERSATIONS,
    OF_OLLAMA,
    OF_RELEASES,
    OF_RESPONSES,
    OWN,
    Endpoint,
)
from llmserve_gateway.fields import Body

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type"]}},
}


def make_document(
    models: Sequence[str], *, batches: bool = False, responses: bool = False
) -> dict[str, Any]:
    # No response schemas: responses have the format that each API's own clients expect.
    model = {"type": "string", "enum": list(models)} if models else {"type": "string"}
    of_responses = (*OF_RESPONSES, *OF_CONVERSATIONS) if responses else ()
    kept = (*(OF_BATCHES if batches else ()), *of_responses)
    rows: Sequence[Endpoint[Any]] = (*ASKED, *OWN, *OF_OLLAMA, *OF_RELEASES, *kept)
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        paths.setdefault(row.name, {})[row.method.lower()] = _operation(row, model)
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmserve", "version": version("llmserve-gateway")},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _operation(row: Endpoint[Any], model: Mapping[str, Any]) -> dict[str, Any]:
    error = {"description": "A refusal or failure", "content": {JSON: {"schema": _ERROR}}}
    operation: dict[str, Any] = {
        "summary": row.summary,
        "responses": {
            "200": {"description": row.summary, "content": {name: {} for name in row.sends}},
            "4XX": error,
            "5XX": error,
        },
    }
    if parameters := [*_in_path(row.name, model), *_in_query(row.query, model)]:
        operation["parameters"] = parameters
    if row.bodies:
        bodies = [_schema(body, model) for body in row.bodies]
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        operation["requestBody"] = {"required": True, "content": {row.accepts: {"schema": schema}}}
    return operation


def _schema(body: Body, model: Mapping[str, Any]) -> dict[str, Any]:
    schema = body.schema()
    if (properties := schema["properties"]) and "model" in properties:
        said = {"description": properties["model"]["description"]}
        choice = model if body.fields["model"].required else {"anyOf": [model, {"type": "null"}]}
        properties["model"] = {**choice, **said}
    return schema


def _in_path(path: str, model: Mapping[str, Any]) -> list[dict[str, Any]]:
    schemas = {"name": model, "id": {"type": "string"}, "item": {"type": "string"}}
    return [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name, schema in schemas.items()
        if f"{{{name}}}" in path
    ]


def _in_query(query: Body | None, model: Mapping[str, Any]) -> list[dict[str, Any]]:
    properties = _schema(query, model)["properties"] if query else {}
    return [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]
