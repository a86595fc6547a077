"""Tool calls in generated text, without a server: the format of each family, split anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.client import Completion, Piece
from llmserve.client.tools.calls import CallStream, read_calls
from llmserve.client.tools.parsers import PARSERS, Arguments

NAMES = frozenset({"weather", "add"})
READERS: dict[str, Any] = {parser.name: parser.reader for parser in PARSERS}
CITY, SUM = '{"city": "Zürich \\"} ]"}', '{"a": 1, "b": [2]}'

# Both calls in the format of each family, as its chat template shows them to the model.
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>\n'
    f'<tool_call>\n{{"arguments": {SUM}, "name": "add"}}\n</tool_call>',
    "llama3": f'<|python_tag|>{{"name": "weather", "parameters": {CITY}}}; '
    f'{{"name": "add", "parameters": {SUM}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {CITY}, "id": "123456789"}}, '
    f'{{"name": "add", "arguments": {SUM}}}]',
    "mistral-11": f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{CITY}[TOOL_CALLS]add{SUM}",
    "deepseek": "<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>weather\n"
    "```json\n"
    f"{CITY}\n```<|tool▁call▁end|>\n<|tool▁call▁begin|>function<|tool▁sep|>add\n```json\n"
    f"{SUM}\n```<|tool▁call▁end|><|tool▁calls▁end|>",
    "deepseek-3.1": f"<|tool▁calls▁begin|><|tool▁call▁begin|>weather<|tool▁sep|>{CITY}"
    f"<|tool▁call▁end|><|tool▁call▁begin|>add<|tool▁sep|>{SUM}<|tool▁call▁end|>"
    "<|tool▁calls▁end|>",
    "generic": f'```json\n[{{"name": "weather", "arguments": {CITY}}}, '
    f'{{"type": "function", "name": "add", "id": 1, "arguments": {SUM}}}]\n```',
    "generic-tags": f'<tool_call>{{"name": "weather", "arguments": {CITY}}}</tool_call>\n'
    f'<tool_call>\n[{{"name": "add", "arguments": {SUM}}}]\n</tool_call>',
    "generic-fences": f'```json\n{{"name": "weather", "arguments": {CITY}}}\n```\n'
    f'```\n{{"name": "add", "arguments": {SUM}}}\n```',
    "generic-json": f'{{"name": "weather", "arguments": {CITY}}}\n;'
    f'{{"name": "add", "parameters": {SUM}}}',
}
# Text that begins like a call, but is not one.
BROKEN = {
    "hermes": [
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1',
        '<tool_call>{"name": "add", "arguments": {"a": ]}}</tool_call> so',
        "<tool_call>{'name': 'add'}</tool_call>",
        '<tool_call>{"name": "add", "arguments": "x"}</tool_call>',
        "a <tool_ca",
    ],
    "llama3": ['{"name": "Anna"}', '{"city": "x"}', "<|python_tag|>print(1)", " [1, 2]", "{\\"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]unknown[ARGS]{}", "[TOOL_CALLS] []", "[TOOL"],
    "deepseek": [
        "<|tool▁calls▁begin|>weather",
        "<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>unknown\n```json\n{}\n```",
    ],
    "generic": [
        "```python\n1\n```",
        "```\n{}\n```",
        '[{"name": "add", "arguments": {}',
        'Like <tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '  So: ```json\n{"name": "Anna"}\n```\n',
        "[]",
        "",
    ],
}
# DeepSeek's bars are wider than the ASCII character.
for name in ("deepseek", "deepseek-3.1"):
    CALLS[name] = CALLS[name].replace("|", "\uff5c")
BROKEN["deepseek"] = [text.replace("|", "\uff5c") for text in BROKEN["deepseek"]]


def reader(family: str) -> Any:
    return READERS[family.partition("-")[0]](NAMES)


def whole(family: str, text: str) -> tuple[str, list[tuple[str, str]], str | None]:
    answer = read_calls(reader(family), Completion(text, "stop"))
    calls = [(call.name, call.arguments) for call in answer.tool_calls]
    return answer.text, calls, answer.finish_reason


def streamed(family: str, pieces: list[str]) -> tuple[str, list[list[str]], str | None]:
    answer = CallStream(reader(family), True)
    text, calls = "", list[list[str]]()
    for piece in [*map(Piece, pieces), Piece("", finish_reason="stop")]:
        piece = answer.convert(piece)
        text += piece.text
        for part in piece.tool_calls:
            if part.name:
                assert (part.index, len(part.id)) == (len(calls), 9)
                calls.append([part.name, ""])
            calls[part.index][1] += part.arguments
    return text, calls, piece.finish_reason


def splits(text: str) -> st.SearchStrategy[list[str]]:
    indexes = st.lists(st.integers(0, len(text)), max_size=8).map(sorted)
    return indexes.map(lambda at: [text[i:j] for i, j in zip([0, *at], [*at, None], strict=True)])


@pytest.mark.parametrize("family", CALLS)
def test_each_familys_calls_are_read(family: str) -> None:
    expected = ("", [("weather", CITY), ("add", SUM)], "tool_calls")
    assert whole(family, CALLS[family]) == expected


@pytest.mark.parametrize(
    "family",
    ["hermes", "mistral", "mistral-11", "deepseek", "llama3", "generic", "generic-tags"],
)
def test_text_before_calls_is_content(family: str) -> None:
    text, calls, _ = whole(family, f"Let me see.\n\n{CALLS[family]}")
    assert (text, len(calls)) == ("Let me see.", 2)


@settings(deadline=None)
@given(st.data())
def test_a_stream_is_parsed_the_same_however_it_is_split(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(sorted(CALLS)))
    others = [*BROKEN[family.partition("-")[0]], "So: \n", "\n", " ", "{", "[", CALLS[family]]
    text = "".join(data.draw(st.lists(st.sampled_from(others), max_size=4)))
    unsplit = streamed(family, [text])
    assert streamed(family, data.draw(splits(text))) == unsplit
    assert streamed(family, list(text)) == unsplit
    content, calls, reason = whole(family, text)
    started = iter(map(tuple, unsplit[1]))
    assert all(call in started for call in calls), "a stream has all calls of a whole answer"
    assert reason == unsplit[2] == ("tool_calls" if calls else "stop")
    if not calls:
        assert content == text
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("family", "text"), [(family, text) for family, texts in BROKEN.items() for text in texts]
)
def test_broken_calls_are_content(family: str, text: str) -> None:
    assert whole(family, text) == (text, [], "stop")


@settings(deadline=None)
@given(st.sampled_from([*READERS, "named"]), st.text('{}[]"\\:,` <tool_call>a1\n', max_size=40))
def test_any_text_is_read_without_loss(family: str, text: str) -> None:
    parser: Any = Arguments(frozenset({"add"})) if family == "named" else reader(family)
    answer = read_calls(parser, Completion(text, "length"))
    assert answer.tool_calls or answer.text == text
    assert answer.finish_reason == "length"


def test_arguments_are_streamed_after_the_name() -> None:
    answer = CallStream(reader("hermes"), False)
    pieces = [answer.convert(Piece(text)).tool_calls for text in (
        'Well <tool_call>{"name": "add", "argu', 'ments": {"a"', ": 1", "}}",
        '</tool_call><tool_call>{"name": "add", "arguments": {}}',
    )]  # fmt: skip
    parts = [(call.index, call.name, call.arguments) for calls in pieces for call in calls]
    assert parts == [(0, "add", '{"a"'), (0, "", ": 1"), (0, "", "}")]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("<tool_call>\n{{ tool_call.arguments|tojson }}\n</tool_call>", "hermes"),
        ("<tool_call>\n<function=' + tool_call.name", "generic"),
        ('{"name": function name, "parameters": dictionary}', "llama3"),
        ("<|python_tag|>", "llama3"),
        ("[TOOL_CALLS] [", "mistral"),
        ("'<\uff5ctool▁call▁begin\uff5c>'", "deepseek"),
        ("{{ tools }}", "generic"),
    ],
)
def test_the_template_selects_the_family(template: str, family: str) -> None:
    assert max(PARSERS, key=lambda parser: parser.suits(template)).name == family
