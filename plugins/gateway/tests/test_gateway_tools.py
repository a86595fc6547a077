"""The tools of a request, as each API of the gateway accepts them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmserve.errors import LLMServeError
from llmserve_gateway.anthropic import read_messages_request
from llmserve_gateway.errors import ApiError, from_llmserve
from llmserve_gateway.openai_requests import read_chat
from llmserve_gateway.responses import read_response_request

FUNCTION: Any = {
    "name": "add",
    "parameters": {
        "type": "object",
        "$defs": {"N": {"type": "integer"}},
        "properties": {"a": {"$ref": "#/$defs/N"}},
    },
}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def test_a_required_call_is_a_json_schema() -> None:
    named = {"type": "function", "function": {"name": "add"}}
    request = read_chat({**CHAT, **TOOLS, "tool_choice": named})
    schema = json.loads(request.options["json_schema"])
    assert schema.pop("x-guidance")["key_separator"] == ": "
    assert schema == {**FUNCTION["parameters"], "additionalProperties": False}
    assert request.options["chat_template_kwargs"] == TOOLS
    request = read_chat({**CHAT, **TOOLS, "tool_choice": "required", "parallel_tool_calls": False})
    schema = json.loads(request.options["json_schema"])
    (call,) = schema["items"]["anyOf"]
    assert (call["properties"]["name"], schema["maxItems"]) == ({"const": "add"}, 1)
    # References to its own definitions are moved along with the schema.
    assert call["properties"]["arguments"] == {"$ref": "#/$defs/0"}
    assert schema["$defs"]["0"]["properties"]["a"] == {"$ref": "#/$defs/0/$defs/N"}
    without_tools: list[Any] = [{"tool_choice": "none"}, {"tools": []}]
    for fields in without_tools:
        assert "chat_template_kwargs" not in read_chat({**CHAT, **TOOLS, **fields}).options


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": 3}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools"),
        ({"tools": TOOLS["tools"] * 2}, "tools"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{}]}, "functions"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a",
                        "arguments": "["}}]}]}, "messages[0].tool_calls[0]"),
    ],
)  # fmt: skip
def test_invalid_tools_are_refused_by_name(body: Any, param: str) -> None:
    with pytest.raises((ApiError, LLMServeError)) as caught:
        read_chat({**CHAT, **TOOLS, **body})
    error = caught.value
    api_error = from_llmserve(error) if isinstance(error, LLMServeError) else error
    assert isinstance(api_error, ApiError)
    assert (api_error.status, api_error.param) == (400, param)


def test_every_dialect_gives_the_template_the_same_messages() -> None:
    function = {"name": "add", "arguments": {"a": 1}}
    chat = read_chat({**CHAT, **TOOLS, "messages": [
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {**function, "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "2"}]})  # fmt: skip
    tool = {"name": "add", "input_schema": FUNCTION["parameters"]}
    message = read_messages_request({"model": "m", "max_tokens": 9, "tools": [tool], "messages": [
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "2"}]}]})  # fmt: skip
    response = read_response_request({
        "model": "m", "tools": [{"type": "function", **FUNCTION}], "input": [
            {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "1", "output": "2"}]})  # fmt: skip
    assert chat.options["messages"] == [
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]  # fmt: skip
    for other in (message, response):
        assert other.options["messages"] == chat.options["messages"]
        (offered,) = other.options["chat_template_kwargs"]["tools"]
        assert {key: offered["function"][key] for key in FUNCTION} == FUNCTION
