"""Tool calls in generated text, without a server: the format of each family, split anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.client import Completion, Piece
from llmserve.client.tools.calls import CallStream, read_calls
from llmserve.client.tools.json_calls import Arguments
from llmserve.client.tools.parsers import PARSERS
from llmserve.client.tools.parts import ToolNames

NAMES = ToolNames.of(
    [
        {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
        {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
    ]
)
READERS: dict[str, Any] = {parser.name: parser.reader for parser in PARSERS if parser.calls}
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
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {CITY}}}, '
    f'{{"name": "add", "arguments": {SUM}}}]',
    "granite-single": f'<|tool_call|>{{"name": "weather", "arguments": {CITY}}}<|/tool_call|>'
    f'<|tool_call|>{{"name": "add", "arguments": {SUM}}}<|/tool_call|>',
    "functools": f'functools[{{"name": "weather", "arguments": {CITY}}}, '
    f'{{"name": "add", "arguments": {SUM}}}]',
    "nemotron": f'<TOOLCALL>[{{"name": "weather", "arguments": {CITY}}}, '
    f'{{"name": "add", "arguments": {SUM}}}]</TOOLCALL>',
    "tool_calls": f'<tool_calls>[\n{{"name": "weather", "arguments": {CITY}}},\n'
    f'{{"name": "add", "arguments": {SUM}}}\n]</tool_calls>',
    "llama3-python": """[weather(city='Zürich "} ]'), add(a=1, b=[2])]""",
    "llama3-4": """<|python_start|>[weather(city='Zürich "} ]'), add(a=1, b=[2])]<|python_end|>""",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{CITY}<|tool_call_end|><|tool_call_begin|>functions.add:1"
    f"<|tool_call_argument_begin|>{SUM}<|tool_call_end|><|tool_calls_section_end|>",
    "functionary": f"<function=weather>{CITY}</function><function=add>{SUM}</function>",
    "qwen3_coder": '<tool_call>\n<function=weather>\n<parameter=city>\nZürich "} ]\n</parameter>\n'
    "</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\n[2]\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": '<seed:tool_call>\n<function=weather>\n<parameter=city>Zürich "} ]</parameter>\n'
    "</function>\n</seed:tool_call><seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n"
    "<parameter=b>[2]</parameter>\n</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">'
    'Zürich "} ]</parameter>\n</invoke>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '<parameter name="b">[2]</parameter>\n</invoke>\n</minimax:tool_call>',
    "glm": '\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich "} ]</arg_value>\n'
    "</tool_call>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>[2]</arg_value>\n</tool_call>",
    "pythonic": "<|tool_call_start|>[weather(city='Zürich \"} ]'), add(a=1, b=[2])]"
    "<|tool_call_end|>",
    "pythonic-olmo": "<function_calls>\nweather(city='Zürich \"} ]')\nadd(a=1, b=[2])\n"
    "</function_calls>",
    "gemma": '<|tool_call>call:weather{city:<|"|>Zürich "} ]<|"|>}<tool_call|>'
    "<|tool_call>call:add{a:1,b:[2]}<tool_call|>",
    "command_r": f'Action: ```json\n[\n{{"tool_name": "weather", "parameters": {CITY}}},\n'
    f'{{"tool_name": "add", "parameters": {SUM}}}\n]```',
    "command_r-lines": '\nAction:\n```json\n[\n    {\n        "tool_name": "weather",\n        '
    f'"parameters": {CITY}\n    }},\n    {{\n        "tool_name": "add",\n        '
    f'"parameters": {SUM}\n    }}\n]```\n',
    "command_a": '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "weather", '
    f'"parameters": {CITY}}},\n{{"tool_call_id": "1", "tool_name": "add", "parameters": {SUM}}}\n'
    "]<|END_ACTION|>",
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    f"{CITY}<|call|><|start|>assistant to=functions.add<|channel|>commentary json"
    f"<|message|>{SUM}<|call|>",
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
for _form in ("qwen3_coder", "seed_oss", "minimax_m2"):
    _call, _, _rest = CALLS[_form].partition("</parameter>")
    BROKEN[_form] = [
        CALLS[_form].replace("weather", "unknown").replace("add", "other"),
        _call,
        f"{_call}</parameter>",
        CALLS[_form].partition("weather")[0],
    ]
BROKEN |= {
    "glm": [
        "<tool_call>unknown\n</tool_call>",
        "<tool_call>add",
        "<tool_call>add\n<arg_key>a</arg_key>",
    ],
    "pythonic": [
        "<|tool_call_start|>[unknown(a=1)]<|tool_call_end|>",
        "[add(1)]",
        "[add(a=b)]",
        "[add(a=1",
        "[weather(city='it's')]",
        "[",
        "[1, 2]",
        "[add]",
        "<function_calls>",
    ],
    "gemma": [
        "<|tool_call>",
        "<|tool_call>call:add{a:}<tool_call|>",
        "<|tool_call>call:no{}<tool_call|>",
    ],
    "kimi_k2": ["<|tool_call_begin|>functions.no:0<|tool_call_argument_begin|>{}<|tool_call_end|>"],
    "functionary": ["<function=no>{}</function>", "<function=add>[]</function>", "<function=add"],
    "granite": ['<|tool_call|>{"name": "no"}', "<|tool_call|>", "<|tool_call|>[]"],
    "nemotron": ["<TOOLCALL>[1]</TOOLCALL>", "<TOOL"],
    "functools": ["functools", "from functools import cache", 'functools[{"name": "no"}]'],
    "tool_calls": ["<tool_calls>[", "<tool_calls>no</tool_calls>"],
    "command_r": [
        "Action:",
        "Action:\n",
        "Action:\n```python",
        "Action: ```json\n[]```",
        "Action: none",
    ],
}
# The marks of these do not remain, whatever the model makes of them.
LOSSY = {"harmony", "command_a"}
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
    others = [
        *BROKEN.get(family.partition("-")[0], []),
        "So: \n",
        "\n",
        " ",
        "{",
        "[",
        CALLS[family],
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(others), max_size=4)))
    unsplit = streamed(family, [text])
    assert streamed(family, data.draw(splits(text))) == unsplit
    assert streamed(family, list(text)) == unsplit
    content, calls, reason = whole(family, text)
    started = iter(map(tuple, unsplit[1]))
    assert all(call in started for call in calls), "a stream has all calls of a whole answer"
    assert reason == unsplit[2] == ("tool_calls" if calls else "stop")
    if not calls and family not in LOSSY:
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
    assert answer.tool_calls or answer.text == text or family in LOSSY
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
        ("<tool_call>\n<function=' + tool_call.name + '>\n<parameter=", "qwen3_coder"),
        ("<seed:tool_call>\n<function=x>\n<parameter=y>", "seed_oss"),
        ("<tool_call>{name}\n<arg_key>", "glm"),
        ("'<minimax:tool_call>'", "minimax_m2"),
        ("<|tool_call_begin|>", "kimi_k2"),
        ("<|tool_call|>", "granite"),
        ("<|channel|>analysis<|message|>", "harmony"),
        ("<|START_ACTION|>", "command_a"),
        ("<|tool_call_start|>[", "pythonic"),
        ('{"name": function name, "parameters": dictionary}', "llama3"),
        ("<|python_tag|>", "llama3"),
        ("use [func_name1(params_name1=params_value1), func_name2(…)]", "llama3"),
        ("a list: functools[{...}, ...]", "functools"),
        ("in <tool_call> tags, {{ tool_call.function.arguments }}: <tool_calls>[", "tool_calls"),
        ('\'Action:\' and a list with "tool_name" and "parameters": ', "command_r"),
        ("[TOOL_CALLS] [", "mistral"),
        ("'<\uff5ctool▁call▁begin\uff5c>'", "deepseek"),
        ("{{ tools }}", "generic"),
    ],
)
def test_the_template_selects_the_family(template: str, family: str) -> None:
    assert (
        max((p for p in PARSERS if p.calls), key=lambda parser: parser.suits(template)).name
        == family
    )


WRITTEN = {
    "pythonic": r"<|tool_call_start|>[weather(city='😀 \ud83d\ude00')]<|tool_call_end|>",
    "llama3": r"[weather(city='😀 \ud83d\ude00')]",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>"
    r'["😀 \ud83d\ude00", "\ud83d"]' + "</arg_value>\n</tool_call>",
    "gemma": '<|tool_call>call:weather{city:<|"|>😀 \U0001f600<|"|>}<tool_call|>',
    "hermes": r'<tool_call>{"name": "weather", "arguments": {"city": "😀 \ud83d\ude00"}}'
    "</tool_call>",
}


@pytest.mark.parametrize("form", WRITTEN)
def test_the_halves_of_a_character_come_together(form: str) -> None:
    reader = READERS[form](ToolNames.of([{"name": "weather"}]))
    answer = read_calls(reader, Completion(WRITTEN[form], "tool_calls"))
    (call,) = answer.tool_calls
    call.arguments.encode()
    city = json.loads(call.arguments)["city"]
    assert (city[0] if form == "glm" else city) == "😀 😀"


def test_a_number_that_json_does_not_have_is_no_argument() -> None:
    for form, text in (
        ("gemma", "<|tool_call>call:add{a:1e999}<tool_call|>"),
        ("pythonic", "<|tool_call_start|>[add(a=1e999)]<|tool_call_end|>"),
    ):
        reader = READERS[form](ToolNames.of([{"name": "add"}]))
        answer = read_calls(reader, Completion(text, "stop"))
        assert (answer.tool_calls, answer.text) == ((), text)
