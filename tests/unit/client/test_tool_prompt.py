"""Tools in plain messages, for chat templates that have no place for them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.client.model import ModelInfo, TensorInfo
from llmserve.client.tools import prompt
from llmserve.client.tools.formats import takes_tools
from llmserve.client.tools.prompt import needs_tools, signature, with_tools_in_messages
from llmserve.client.tools.request import Tools

CITY = {"type": "string", "title": "City", "enum": ["Tokyo", "Paris"]}
WEATHER = {
    "name": "weather",
    "description": "Look up\nthe weather.",
    "strict": True,
    "parameters": {
        "title": "Weather",
        "type": "object",
        "properties": {"city": CITY, "days": {"type": "integer", "description": "How many"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ADD = {"name": "add"}
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
OTHER = {"id": "2", "function": {"name": "add", "arguments": '{"a": 1}'}}
TALK: list[Any] = [
    USER,
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, OTHER]},
    {"role": "tool", "tool_call_id": "1", "content": "warm"},
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "2"}]},
]


def tools(choice: Any = None, named: str | None = None) -> Tools:
    checked = Tools.checked([WEATHER, ADD], choice, named, parallel=True)
    assert checked
    return checked


def model(*inputs: str) -> ModelInfo:
    tensors = {name: TensorInfo(name, "BYTES", (1,)) for name in inputs}
    return ModelInfo("m", "unary", False, None, tensors, {}, "0.1")


def test_a_template_with_tools_shows_them_and_others_do_not() -> None:
    with_kwargs = model("messages", "chat_template_kwargs")
    assert takes_tools(with_kwargs, "{% for tool in tools %}")
    assert takes_tools(with_kwargs, None), "nothing is known of it: it gets tools as before"
    assert not takes_tools(with_kwargs, "{{ messages }}")
    assert not takes_tools(model("messages"), "{{ tools }}")


def test_only_a_conversation_with_calls_or_results_needs_tools() -> None:
    assert not needs_tools([USER, {"role": "assistant", "content": "Hi"}, 3])
    assert not needs_tools(None)
    assert needs_tools(TALK[:2])
    assert needs_tools(TALK[2:])


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": "string"}, "string"),
        ({"const": "a"}, '"a"'),
        ({"type": ["integer", "null"]}, "integer | null"),
        ({"anyOf": [{"type": "number"}, {"type": "null"}, {"type": "number"}]}, "number | null"),
        ({"type": "array", "items": {"type": "boolean"}}, "boolean[]"),
        ({"type": "array", "items": {"enum": [1, 2]}}, "(1 | 2)[]"),
        ({"type": "array"}, "any[]"),
        ({"type": "object"}, "object"),
        ({"properties": {"b": {"$ref": "#/$defs/B"}}, "required": ["b"]}, "{b: {c?: string}}"),
        ({"$ref": "#/$defs/Missing"}, "any"),
        ({"$ref": "#/$defs/Loop"}, "any"),
        ({"type": 3}, "any"),
        (True, "any"),
        ({"properties": 3}, "object"),
    ],
)
def test_a_schema_is_written_as_a_type(schema: Any, written: str) -> None:
    places = {
        "B": {"properties": {"c": {"type": "string"}}},
        "Loop": {"$ref": "#/$defs/Loop"},
    }
    parameters = {"properties": {"a": schema}, "required": ["a"], "$defs": places}
    assert signature({"name": "f", "parameters": parameters}) == f"- f(a: {written})"


def test_an_object_that_contains_itself_ends() -> None:
    node = {"properties": {"next": {"$ref": "#/$defs/Node"}, "other": {"$ref": "#/$defs/Node"}}}
    line = signature({"name": "f", "parameters": {**node, "$defs": {"Node": node}}})
    assert len(line) < 500
    # Far more than this would be, with every part written out: a hundred to the fifth power.
    wide = {f"p{i}": {"$ref": "#/$defs/Wide"} for i in range(100)}
    texts = {"enum": ["x" * 10_000]}
    places = {"Wide": {"properties": {**wide, "text": texts}}}
    line = signature({"name": "f", "parameters": {"properties": wide, "$defs": places}})
    assert 10_000 < len(line) < 100_000


_MANY = 200_000
_REFERENCES = {f"p{i}": {"$ref": "#/$defs/Long"} for i in range(5_000)}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": [f"t{i}" for i in range(_MANY)]}}},
        {"properties": {"a": {"type": [3] * _MANY, **dict.fromkeys(map(str, range(_MANY)))}}},
        {"properties": dict.fromkeys(map(str, range(_MANY))), "required": ["b"] * _MANY},
        {"properties": {"a": True}, "required": [[], {}, 3]},
        *(
            {"properties": _REFERENCES, "$defs": {"Long": long}}
            for long in (
                {"enum": ["x"] * _MANY},
                {"type": ["x"] * _MANY},
                {"anyOf": [True] * _MANY},
                {"type": "x" * 1_000_000},
                {"properties": {"a": {"description": " " * 1_000_000}}},
                {"properties": {}, "required": ["b"] * _MANY},
                {"$ref": "#/$defs/" + "x" * 1_000_000},
            )
        ),
    ],
)
def test_a_long_schema_is_read_in_a_moment(parameters: Any) -> None:
    """It is read on the loop of the gateway, whose other requests wait meanwhile."""
    started = time.process_time()
    line = signature({"name": "f", "parameters": parameters})
    assert time.process_time() - started < 2
    assert len(line) < 2_000_000


def test_a_message_describes_the_tools_and_how_to_call_them() -> None:
    options = tools().options({"messages": [USER], "chat_template_kwargs": {"a": 1}, "seed": 1})
    result = with_tools_in_messages(options, tools())
    (message,) = result.pop("messages")
    # Nothing else reaches the template, which would ignore it or refuse it.
    assert result == {"chat_template_kwargs": {"a": 1}, "seed": 1}
    assert message["role"] == "user"
    text, _, question = message["content"].rpartition("\n\n")
    assert question == "Hi"
    lines = text.splitlines()
    assert lines[1:3] == [
        '- weather(city: "Tokyo" | "Paris", days?: integer (How many)): Look up the weather.',
        "- add()",
    ]
    assert "<tool_call>" in lines[4]
    assert "chat_template_kwargs" not in with_tools_in_messages(
        tools().options({"messages": [USER]}), tools()
    )


@pytest.mark.parametrize(("named", "whom"), [(None, "one of them"), ("add", "add")])
def test_a_required_call_is_demanded_and_only_the_named_tool_shown(
    named: str | None, whom: str
) -> None:
    demanded = with_tools_in_messages({"messages": [USER]}, tools("required", named))
    text = demanded["messages"][0]["content"].removesuffix("\n\nHi")
    assert text.splitlines()[-1] == f"Call {whom} now."
    assert "<tool_call>" not in text, "the answer is constrained to another form"
    assert ("Look up" in text) == (named is None)


def test_the_description_joins_the_system_message_if_there_is_one() -> None:
    system = {"role": "system", "content": "Be short."}
    first, second = with_tools_in_messages({"messages": [system, USER]}, tools())["messages"]
    assert first["content"].startswith("Be short.\n\nYou can call")
    assert second == USER
    (only, _) = with_tools_in_messages({"messages": TALK[1:2]}, tools())["messages"]
    assert only["role"] == "user"


def test_the_description_has_the_text_that_was_set() -> None:
    result = with_tools_in_messages({"messages": [USER]}, tools(), "Use {tools} or {x}.")
    text = result["messages"][0]["content"]
    assert text.startswith("Use - weather(")
    assert text.endswith("or {x}.\n\nHi")


def test_calls_and_results_are_turns_of_text_that_alternate() -> None:
    talk = [*TALK, {"role": "user", "content": "And now?"}]
    first, second, third = with_tools_in_messages({"messages": talk}, None)["messages"]
    assert first == USER
    assert second == {
        "role": "assistant",
        "content": "Let me see.\n"
        '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>\n'
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    }
    assert third == {
        "role": "user",
        "content": "<tool_response>\nwarm\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response>\nAnd now?",
    }


@pytest.mark.parametrize("message", [None, 3, {"role": "assistant", "tool_calls": 3}, {}])
def test_what_is_not_a_message_is_left_to_the_model(message: Any) -> None:
    result = with_tools_in_messages({"messages": [message, *TALK]}, tools())
    assert result["messages"][0] == message
    assert len(result["messages"]) == 4


IMAGE = [{"type": "image"}]
RESULTS = st.one_of(
    st.none(), st.sampled_from(["a", "", "b\nc"]), st.just(IMAGE),
    st.just([{"type": "text", "text": "d"}]), st.just([{"type": "text", "text": "e"}, *IMAGE]),
)  # fmt: skip


@given(st.lists(RESULTS, min_size=1, max_size=6), st.one_of(st.just("none"), RESULTS))
def test_results_are_joined_as_if_one_by_one(results: list[Any], after: Any) -> None:
    messages = [{"role": "tool", "content": content} for content in results]
    if after != "none":
        messages.append({"role": "user", "content": after})
    turns = [prompt._plain_turn(message)["content"] for message in messages]
    whole = turns[0]
    for turn in turns[1:]:
        whole = prompt._joined("\n", whole, turn)
    content = whole if len(messages) > 1 or after == "none" else turns[0]
    assert with_tools_in_messages({"messages": messages}, None)["messages"] == [
        {"role": "user", "content": content}
    ]


@pytest.mark.parametrize("first", ["x", IMAGE])
def test_very_many_results_are_joined_in_linear_time(first: Any) -> None:
    results = [{"role": "tool", "content": content} for content in [first, *["x" * 60] * 40_000]]
    began = time.process_time()
    (turn,) = with_tools_in_messages({"messages": results}, None)["messages"]
    assert time.process_time() - began < 2.5
    assert turn["role"] == "user"


def test_images_stay_where_a_prompt_is_added() -> None:
    image = {"type": "image"}
    (message,) = prompt._with_text([{"role": "user", "content": [image]}], "TOOLS")
    assert image in message["content"]
    assert message["content"][0] == {"type": "text", "text": "TOOLS"}
    result = prompt._plain_turn({"role": "tool", "content": [image], "tool_call_id": "1"})
    assert result["content"].count(image) == 1
