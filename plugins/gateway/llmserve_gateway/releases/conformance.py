"""Whether an answer has the form that its request has asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llmserve.client import Completion, Tools

_DEEPEST = 64
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and float(value).is_integer(),
    "number": lambda value: _is_number(value),
}


def what_is_wrong(
    answer: Completion, options: Mapping[str, Any], tools: Tools | None = None
) -> str:
    """Return what is wrong with an answer whatever it says, "" if nothing is seen.

    One that was cut is not blamed for the end that it lacks.
    """
    if not _is_cut(answer) and (wrong := _wrong_calls(answer, tools)):
        return wrong
    text = answer.text.strip()
    if not text:
        has_more = answer.tool_calls or answer.reasoning
        return "" if has_more or _is_cut(answer) else "it is empty"
    if answer.tool_calls or _is_cut(answer):
        return ""
    schema = options.get("json_schema")
    if not schema and not options.get("json_object"):
        return ""
    if (value := _parsed(text)) is _INVALID:
        return "it is no JSON"
    if not schema:
        return "" if isinstance(value, dict) else "it is no JSON object"
    wanted = _parsed(schema) if isinstance(schema, str) else schema
    return "" if conforms(value, wanted) else "it is not as its schema says"


def _wrong_calls(answer: Completion, tools: Tools | None) -> str:
    """Return what is wrong with the calls of an answer to a request with these tools."""
    functions = {f["name"]: f for f in tools.allowed_functions} if tools else {}
    for call in answer.tool_calls:
        arguments = _parsed(call.arguments or "{}")
        if not isinstance(arguments, dict):
            return f"the arguments of {call.name!r:.80} are no JSON object"
        if tools is None:
            continue
        if call.name not in functions:
            return f"it calls {call.name!r:.80}, which is no tool of its request"
        if not conforms(arguments, functions[call.name].get("parameters") or {}):
            return f"the arguments of {call.name!r:.80} are not as its schema says"
    if tools is None:
        return ""
    if tools.required and not answer.tool_calls:
        return "it calls no tool, and its request says that it must"
    if not tools.parallel and len(answer.tool_calls) > 1:
        return "it has several calls, and its request allows one"
    return ""


def conforms(value: Any, schema: Any, depth: int = 0) -> bool:
    """Return False for a value that a JSON schema forbids.

    Only types, required and known fields, items, and constants are looked at: what else a schema
    says is never a reason to blame an answer.
    """
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return schema is not False
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    tests = [_TYPES[name] for name in names if name in _TYPES]
    if len(tests) == len(names) and tests and not any(test(value) for test in tests):
        return False
    if isinstance(choices := schema.get("enum"), list) and value not in choices:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if isinstance(value, dict):
        fields = schema.get("properties")
        fields = fields if isinstance(fields, Mapping) else {}
        required = schema.get("required")
        if isinstance(required, list) and any(name not in value for name in required):
            return False
        is_closed = schema.get("additionalProperties") is False
        if is_closed and "patternProperties" not in schema and any(n not in fields for n in value):
            return False
        return all(
            conforms(value[name], each, depth + 1) for name, each in fields.items() if name in value
        )
    if isinstance(value, list) and "items" in schema and "prefixItems" not in schema:
        return all(conforms(each, schema["items"], depth + 1) for each in value)
    return True


_INVALID = object()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _INVALID


def _is_cut(answer: Completion) -> bool:
    return answer.finish_reason in ("length", "cancelled")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
