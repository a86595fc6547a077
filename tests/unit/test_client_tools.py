"""The tools of a request by llmserve's own client: what is asked for, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmserve.client import Completion
from llmserve.client.tools import Tools, shown_tools
from llmserve.errors import OptionError

CHAT = [{"role": "user", "content": "Hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}}}}}
NAMED = {"type": "function", "function": {"name": "add"}}


def test_tools_are_shown_and_a_call_that_has_to_be_is_held_to_its_schema() -> None:
    asked = {"messages": CHAT, "tools": [ADD], "chat_template_kwargs": {"brief": True}}
    shown = {"brief": True, "tools": [ADD]}
    free = shown_tools(asked)
    assert free == {"messages": CHAT, "chat_template_kwargs": shown}
    held = shown_tools({**asked, "tool_choice": NAMED, "parallel_tool_calls": False})
    assert held.keys() == {"messages", "chat_template_kwargs", "json_schema"}
    assert json.loads(held["json_schema"])["properties"] == {"a": {}}
    assert shown_tools({"messages": CHAT, "tools": [ADD], "tool_choice": "none"}) == {
        "messages": CHAT
    }
    assert shown_tools({"max_tokens": 4}) == {"max_tokens": 4}


def test_an_answer_that_had_to_be_a_call_is_one_or_was_cut() -> None:
    tools = Tools.of({"messages": CHAT, "tools": [ADD], "tool_choice": "required"})
    assert tools
    whole = Completion('[{"name": "add", "arguments": {"a": "é"}}]', "stop")
    read = tools.read_held(whole)
    (call,) = read.tool_calls
    assert (call.index, call.name, call.arguments) == (0, "add", '{"a": "é"}')
    assert (read.text, read.finish_reason) == ("", "tool_calls")
    cut = Completion('[{"name": "a', "length")
    assert tools.read_held(cut) == cut


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"tools": [ADD], "messages": None}, "with messages"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [{"type": "web_search"}]}, "has to be a function"),
        ({"tools": "add"}, "has to be a list"),
        ({"tools": [ADD, ADD]}, "a name of its own"),
        ({"tools": [ADD], "tool_choice": "perhaps"}, "none, auto, required"),
        ({"tools": [ADD], "tool_choice": {"function": {"name": "sub"}}}, "which is no tool"),
        ({"tools": [ADD], "regex": "a+"}, "leave out one"),
        ({"tools": [ADD], "chat_template_kwargs": "brief"}, "has to be a mapping"),
    ],
)
def test_what_cannot_be_meant_is_refused(asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        shown_tools({"messages": CHAT, **asked})
