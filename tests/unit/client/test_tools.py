"""Tools in a request of llmserve's own client: what the client sends, and what it refuses."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from llmserve.client import Completion, connect
from llmserve.client.tools.calls import read_calls
from llmserve.client.tools.json_calls import Json
from llmserve.client.tools.request import Tools, apply_tools
from llmserve.errors import OptionError, RequestTimeoutError
from llmserve.testing import ScriptedTriton

CHAT = [{"role": "user", "content": "Hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}}}}}
NAMED = {"type": "function", "function": {"name": "add"}}


def applied(options: dict[str, Any]) -> dict[str, Any]:
    return apply_tools(options, Tools.of(options))


def test_the_template_gets_the_tools_and_a_required_call_is_constrained() -> None:
    options = {"messages": CHAT, "tools": [ADD], "chat_template_kwargs": {"brief": True}}
    kwargs = {"brief": True, "tools": [ADD]}
    assert applied(options) == {"messages": CHAT, "chat_template_kwargs": kwargs}
    required = applied({**options, "tool_choice": NAMED, "parallel_tool_calls": False})
    assert required.keys() == {"messages", "chat_template_kwargs", "json_schema"}
    assert json.loads(required["json_schema"])["properties"] == {"a": {}}
    assert applied({"messages": CHAT, "tools": [ADD], "tool_choice": "none"}) == {"messages": CHAT}
    assert applied({"max_tokens": 4}) == {"max_tokens": 4}


def test_a_required_call_is_a_call_unless_the_answer_was_cut() -> None:
    tools = Tools.of({"messages": CHAT, "tools": [ADD], "tool_choice": "required"})
    assert tools
    whole = Completion('[{"name": "add", "arguments": {"a": "é"}}]', "stop")
    completion = read_calls(Json(tools.names), whole)
    (call,) = completion.tool_calls
    assert (call.index, call.name, call.arguments) == (0, "add", '{"a": "é"}')
    assert (completion.text, completion.finish_reason) == ("", "tool_calls")
    cut = Completion('[{"name": "a', "length")
    assert read_calls(Json(tools.names), cut) == cut


def test_the_template_is_asked_for_once(scripted: ScriptedTriton, url: str) -> None:
    scripted.inputs = ["chat_template_kwargs"]
    scripted.pieces = [json.dumps({"chat_template": "{{ tools }} <tool_call>"})]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    with connect(url) as client:
        for _ in range(2):
            client.generate("m", messages=[*CHAT, call], tools=[ADD])
    # The question about the template has no messages; then there are two requests.
    assert scripted.messages == ["", *[json.dumps([*CHAT, call])] * 2]


def test_a_request_with_tools_waits_no_longer_than_its_timeout() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        connect(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout=60) as client,
        pytest.raises(RequestTimeoutError, match=r"within 0\.3 s"),
    ):
        client.generate("m", messages=CHAT, tools=[ADD], tool_choice="required", timeout=0.3)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tools": [ADD], "messages": None}, "with messages"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [{"type": "web_search"}]}, "must be a function"),
        ({"tools": "add"}, "must be a list"),
        ({"tools": [ADD, ADD]}, "a unique name"),
        ({"tools": [ADD], "tool_choice": "perhaps"}, "none, auto, required"),
        ({"tools": [ADD], "tool_choice": {"function": {"name": "sub"}}}, "which is not a tool"),
        (
            {"tools": [ADD], "tool_choice": {"type": "allowed_tools", "tools": []}},
            "list the allowed tools",
        ),
        (
            {
                "tools": [ADD],
                "tool_choice": {
                    "type": "allowed_tools",
                    "tools": [{"type": "function", "name": "sub"}],
                },
            },
            "which is not a tool",
        ),
        ({"tools": [ADD], "chat_template_kwargs": "brief"}, "must be a mapping"),
    ],
)
def test_invalid_tool_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        applied({"messages": CHAT, **options})


@pytest.mark.parametrize("nested", [True, False])
def test_only_allowed_tools_may_be_called_and_all_are_shown(nested: bool) -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {}}}
    spec = {"type": "function", "function": {"name": "other"}}
    content = {"mode": "required", "tools": [spec]}
    choice = {"type": "allowed_tools", **({"allowed_tools": content} if nested else content)}
    tools = Tools.of({"messages": CHAT, "tools": [ADD, other], "tool_choice": choice})
    assert tools
    assert tools.names == {"other"}
    options = tools.options({"messages": CHAT, "json_object": True})
    assert len(options["chat_template_kwargs"]["tools"]) == 2
    (call,) = json.loads(options["json_schema"])["items"]["anyOf"]
    assert call["properties"]["name"] == {"const": "other"}
    # A required call is the whole answer, so the form of other answers does not apply.
    assert "json_object" not in options
