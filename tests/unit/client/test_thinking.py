"""A model's thinking, told from its answer: the marks of each family, split anywhere."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.client import Completion, ModelInfo, Piece, TensorInfo, ToolFormats, Tools, ToolsError
from llmserve.client.tools.calls import CallStream, read_calls
from llmserve.client.tools.markup_calls import kinds_of, value_of
from llmserve.client.tools.parsers import PARSERS
from llmserve.client.tools.thinking import Chain
from llmserve.errors import PluginError
from llmserve.plugin import ToolParser

NAMES = frozenset({"add"})
BY_NAME = {parser.name: parser for parser in PARSERS}
THINKING = [parser.name for parser in PARSERS if parser.thinking]
CALL = {
    "think": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "harmony": '<|channel|>commentary to=functions.add json<|message|>{"a": 1}<|call|>',
    "command_a": '<|START_ACTION|>[{"tool_name": "add", "parameters": {"a": 1}}]<|END_ACTION|>',
}
WRAPPED = {
    "think_response": ("<response>", "</response>"),
    "think_answer": ("<answer>\n", "\n</answer>"),
    "final_response": ("", "\n[END FINAL RESPONSE]"),
    "command_a": ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "harmony": ("<|start|>assistant<|channel|>final<|message|>", "<|return|>"),
}
MARKS = ("<", "|>", "[THINK", "[/THINK", "</")


def written(name: str, thought: str, answer: str) -> str:
    """Return an answer as a model of that family writes it."""
    begin, end = BY_NAME[name].thinking[:2]
    if name == "harmony":
        begin, end = "<|channel|>analysis<|message|>", "<|end|>"
    before, after = WRAPPED.get(name, ("", ""))
    return f"{begin}\n{thought}\n{end}\n\n{before}{answer}{after}"


def reader(name: str, begun: str = "", calls: str = "hermes") -> Any:
    parser = BY_NAME[name]
    first = parser.reader(NAMES if parser.calls else frozenset())
    first.read(begun)
    return Chain(first, None if parser.calls else BY_NAME[calls].reader(NAMES))


def whole(read: Any, text: str) -> tuple[str, str, int]:
    answer = read_calls(read, Completion(text, "stop"))
    return answer.reasoning, answer.text, len(answer.tool_calls)


def streamed(read: Any, pieces: list[str]) -> tuple[str, str, int]:
    answer = CallStream(read, True)
    converted = [answer.convert(p) for p in [*map(Piece, pieces), Piece("", finish_reason="stop")]]
    calls = sum(bool(call.name) for piece in converted for call in piece.tool_calls)
    return "".join(p.reasoning for p in converted), "".join(p.text for p in converted), calls


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted(min(i, len(text)) for i in at)
    return [text[i:j] for i, j in zip([0, *places], [*places, None], strict=True)]


# Words, spaces, line breaks, and what marks are made of.
TEXT = st.text('ab é.{}"\n<>/|[]', max_size=24).filter(lambda t: not any(m in t for m in MARKS))
CUTS = st.lists(st.integers(0, 200), max_size=9)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(THINKING), TEXT, TEXT, CUTS)
def test_thinking_is_told_from_the_answer(
    name: str, thought: str, answer: str, cuts: list[int]
) -> None:
    text = written(name, thought, answer)
    reasoning, content, calls = whole(reader(name), text)
    assert reasoning == thought.strip()
    assert content.strip() == answer.strip()
    assert not calls
    assert streamed(reader(name), cut(text, cuts)) == (reasoning, content, 0)
    assert streamed(reader(name), list(text)) == (reasoning, content, 0)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(sorted({*THINKING} - {"harmony"})), TEXT, TEXT, CUTS)
def test_an_answer_may_begin_within_the_thinking(
    name: str, thought: str, answer: str, cuts: list[int]
) -> None:
    """Where the prompt has the first mark, with or without white space after it."""
    begin = BY_NAME[name].thinking[0]
    text = written(name, thought, answer)
    expected = whole(reader(name), text)
    begun = reader(name, f"{begin}\n")
    assert streamed(begun, cut(text.removeprefix(begin), cuts)) == expected
    # Some write it once more.
    assert whole(reader(name, begin), text) == expected


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(THINKING), TEXT, CUTS, st.integers(0, 60))
def test_thinking_that_never_ends_is_no_content(
    name: str, thought: str, cuts: list[int], length: int
) -> None:
    begin = written(name, "", "").partition("\n")[0]
    text = written(name, f"a{thought}", "")[: len(begin) + 1 + length].partition("\n\n")[0]
    reasoning, content, _ = whole(reader(name), text)
    assert content == ""
    assert f"a{thought}".startswith(reasoning)
    assert streamed(reader(name), cut(text, cuts)) == (reasoning, "", 0)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(sorted(CALL)), TEXT, CUTS)
def test_calls_follow_the_thinking(name: str, thought: str, cuts: list[int]) -> None:
    before = "<|start|>assistant" if name == "harmony" else ""
    text = written(name, thought, "").partition(WRAPPED.get(name, ("\0",))[0])[0]
    text += before + CALL[name]
    assert whole(reader(name), text) == (thought.strip(), "", 1)
    assert streamed(reader(name), cut(text, cuts)) == (thought.strip(), "", 1)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(THINKING), st.text("<think>/|channelmsgf[]THINK \n", max_size=40), CUTS)
def test_any_text_is_read_the_same_however_it_is_split(
    name: str, text: str, cuts: list[int]
) -> None:
    expected = whole(reader(name), text)
    assert streamed(reader(name), cut(text, cuts)) == expected
    assert streamed(reader(name), list(text)) == expected
    if name.startswith("think") and not text.strip().startswith(("<think", "</think")):
        assert expected == ("", text, 0)


def test_an_answer_without_thinking_is_left_alone() -> None:
    text = " What <think> is for:\n </think>"
    assert whole(reader("think"), text) == ("", text, 0)
    # A prompt that closes the thinking at once.
    assert whole(reader("think", "<think>\n\n</think>\n\n"), "Yes.") == ("", "Yes.", 0)
    assert whole(reader("think"), "<think>\n\n</think>\n\nYes.") == ("", "Yes.", 0)
    assert whole(reader("think", "</think>"), "Yes.") == ("", "Yes.", 0)


def test_channels_without_a_reader_of_their_own_are_content() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
        "<|channel|>commentary to=python code<|message|>1+1<|call|>"
    )
    assert whole(reader("harmony"), text) == ("Hm.\nSo.", "I look.1+1", 0)
    assert whole(reader("harmony"), "No channels.") == ("", "No channels.", 0)
    assert whole(reader("harmony"), "<|channel|>fin") == ("", "", 0)


def test_tokens_of_the_thinking_are_counted_in_a_stream() -> None:
    stream = CallStream(reader("think"), True)
    pieces = ["<think>", "\n", "I", " see", "</think>", "\n\n", "Yes", "."]
    counts = [
        stream.convert(Piece(text, output_tokens=number)).reasoning_tokens
        for number, text in enumerate(pieces, 1)
    ]
    assert counts == [None, None, 3, 4, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", {"type": "number"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("5", {}, 5),
        ("five", {"type": "integer"}, "five"),
        ("True", {"type": "boolean"}, True),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("{'a': [1]}", {"type": "object"}, {"a": [1]}),
        ('{"a": 1}', {"$ref": "#/$defs/Inner"}, {"a": 1}),
        ('{"a": 1}', {"enum": ["x"]}, '{"a": 1}'),
        ('"5"', {}, '"5"'),
        ("NaN", {"type": "number"}, "NaN"),
        ("{1, 2}", {"type": "array"}, "{1, 2}"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
    ],
)
def test_the_schema_tells_what_a_text_stands_for(text: str, schema: Any, value: Any) -> None:
    root = {"properties": {"x": schema}, "$defs": {"Inner": {"type": "object"}}}
    assert value_of(text, kinds_of(root, "x")) == value


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>' ~ reasoning ~ '</think>' }}", "think"),
        ("<think>\n\n</think>\n <|extra_0|>", "think_answer"),
        ("<think></think><answer></answer>", "think_answer"),
        ("<think></think><response></response>", "think_response"),
        ("the marker [BEGIN FINAL RESPONSE]", "final_response"),
        ("<thinking></thinking> [BEGIN FINAL RESPONSE] ... [END FINAL RESPONSE]", "final_response"),
        ("[THINK] [/THINK] [TOOL_CALLS]", "mistral_think"),
        ("<seed:think></seed:think>", "seed_think"),
    ],
)
def test_the_template_selects_the_form_of_thinking(template: str, name: str) -> None:
    best = max((BY_NAME[one] for one in THINKING), key=lambda parser: parser.suits(template))
    assert best.name == name


@pytest.mark.parametrize(
    ("name", "calls", "text"),
    [
        ("final_response", "tool_calls",
         'One.\n[BEGIN FINAL RESPONSE]\nSo.\n<tool_calls>[{"name": "add", "arguments": {}}]'
         "</tool_calls>"),
        ("think_answer", "tool_calls",
         '\nOne.\n</think>\n<answer>\n\u52a9\u624b\uff1aSo.\n'
         '<tool_calls>[{"name": "add", "arguments": {}}]</tool_calls>\n</answer>'),
        ("think", "minimax_m2",
         'One.\n</think>\n\nSo.\n<minimax:tool_call>\n<invoke name="add">\n</invoke>\n'
         "</minimax:tool_call>"),
        ("think", "nemotron",
         'One.\n</think>\n\nSo.\n<TOOLCALL>[{"name": "add", "arguments": {}}]</TOOLCALL>'),
    ],
)  # fmt: skip
def test_calls_follow_thinking_that_the_prompt_began(name: str, calls: str, text: str) -> None:
    begun = f"{BY_NAME[name].thinking[0]}\n"
    reasoning, content, count = whole(reader(name, begun, calls), text)
    assert (reasoning, content.strip(), count) == ("One.", "So.", 1)
    for at in range(len(text)):
        assert streamed(reader(name, begun, calls), cut(text, [at])) == (reasoning, content, 1)


def info(*inputs: str) -> ModelInfo:
    tensors = {name: TensorInfo(name, "BYTES", (1,)) for name in inputs}
    return ModelInfo("m", "stream", True, None, tensors, {}, made_by_llmserve="1")


FULL = ("text_input", "messages", "chat_template_kwargs", "json_schema")
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


class Prompts:
    """Renders prompts that end with the thinking, unless it is turned off."""

    def __init__(self, template: str) -> None:
        self.template = template
        self.asked: list[Any] = []

    async def read(self, model: str) -> str:
        del model
        return self.template

    async def render(self, model: str, options: Any) -> str:
        self.asked.append((model, options))
        (message,) = options["messages"]
        thinks = options.get("chat_template_kwargs", {}).get("enable_thinking", True)
        end = "<think>\n" if thinks else "<think>\n\n</think>\n\n"
        return f"<user>{message['content']}<assistant>{end}"

    def formats(self, *parsers: str) -> ToolFormats:
        return ToolFormats(self.read, prompt_of=self.render, parsers=parsers)


def read(formats: ToolFormats, text: str, model: ModelInfo, **options: Any) -> Completion:
    async def answer() -> Completion:
        new_reader = await formats.readers(model, None, {**HELLO, **options})
        return read_calls(new_reader(), Completion(text)) if new_reader else Completion(text)

    return asyncio.run(answer())


def test_the_prompt_shows_whether_the_answer_begins_within_the_thinking() -> None:
    prompts = Prompts("{{ tools }} <think> </think>")
    formats = prompts.formats()
    for _ in range(2):
        answer = read(formats, "Hm.</think>Yes.", info(*FULL))
        assert (answer.reasoning, answer.text) == ("Hm.", "Yes.")
        off = {"enable_thinking": False, "tools": []}
        answer = read(formats, "Yes.", info(*FULL), chat_template_kwargs=off)
        assert (answer.reasoning, answer.text) == ("", "Yes.")
    assert len(prompts.asked) == 2


def test_a_schema_that_refers_to_itself_in_many_ways_is_read_once() -> None:
    again = {"$ref": "#/$defs/a"}
    schema = {
        "properties": {"x": again, "y": {"anyOf": [{"$ref": "#/$defs/b"}] * 2}},
        "$defs": {"a": {"anyOf": [again] * 3000}, "b": {"type": "integer"}},
    }
    began = time.process_time()
    assert [set(kinds_of(schema, name)) for name in ("x", "y")] == [set(), {"integer"}]
    assert time.process_time() - began < 1


@pytest.mark.parametrize("name", ["command_r", "harmony", "command_a", "hermes", "think"])
def test_a_long_answer_that_repeats_marks_is_read_in_linear_time(name: str) -> None:
    parser = BY_NAME[name]
    for mark in ("Action:", "<|channel|>", "<|START_RESPONSE|>", "<tool_call>", "<think>"):
        began = time.process_time()
        answer = Completion(f"{mark} x " * (200_000 // len(mark)))
        read_calls(parser.reader(NAMES), answer)
        # Whole, such a text took from 4 to 17 s.
        assert time.process_time() - began < 3, (name, mark)


def test_a_model_that_does_not_answer_now_is_asked_again() -> None:
    class Busy(Prompts):
        async def render(self, model: str, options: Any) -> str:
            prompt = await super().render(model, options)
            return prompt if len(self.asked) > 1 else None  # type: ignore[return-value]

    formats = Busy("{{ tools }} <think> </think>").formats()
    assert read(formats, "Hm.</think>Yes.", info(*FULL)).text == "Hm.</think>Yes."
    for _ in range(2):
        answer = read(formats, "Hm.</think>Yes.", info(*FULL))
        assert (answer.reasoning, answer.text) == ("Hm.", "Yes.")


def test_what_is_kept_of_prompts_is_small_whatever_clients_send() -> None:
    formats = Prompts("{{ tools }} <think> </think>").formats()
    for number in range(300):
        kwargs = {"note": f"{number}" * 5000}
        assert read(formats, "Hm.</think>Yes.", info(*FULL), chat_template_kwargs=kwargs).reasoning
    kept = list(formats._ends.items())
    assert len(kept) <= 256
    assert max(len(key) + len(end) for key, end in kept) < 2000


def test_a_template_without_thinking_needs_no_reader_and_one_can_be_named() -> None:
    prompts = Prompts("{{ tools }}")
    text = "<think>Hm.</think>Yes."
    assert read(prompts.formats(), text, info(*FULL)).text == text
    for named in ("think", "m=think"):
        assert read(prompts.formats(named), text, info(*FULL)).reasoning == "Hm."
    assert read(prompts.formats("other=think"), text, info(*FULL)).text == text
    assert not asyncio.run(prompts.formats().thinks(info(*FULL)))


def place(template: str, model: ModelInfo, tools: Any = None, **options: Any) -> dict[str, Any]:
    formats = Prompts(template).formats()
    read_tools = Tools.of({**HELLO, "tools": tools or []})
    given = {**HELLO, **options}
    given = read_tools.options(given) if read_tools else given
    return asyncio.run(formats.place(model, given, read_tools))


def test_a_constraint_is_told_what_precedes_the_answer() -> None:
    think, harmony = "{{ tools }}</think><tool_call>", "{{ tools }}<|channel|>"
    form = {"json_schema": "{}"}
    assert place(think, info(*FULL), **form)["thinking_marks"] == [
        "</think>", "</think>", "<think>",
    ]  # fmt: skip
    end, close = place(harmony, info(*FULL), **form)["thinking_marks"]
    assert close.endswith(end)
    assert "thinking_marks" not in place(think, info(*FULL))
    assert "thinking_marks" in place(think, info(*FULL), thinking_token_budget=0)
    assert "thinking_marks" not in place("{{ tools }}", info(*FULL), **form)


def test_tools_and_a_form_go_together_where_calls_begin_with_a_mark() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {}}}}
    form = {"json_schema": "{}"}
    options = place("{{ tools }}<tool_call>", info(*FULL), [tool], **form)
    assert (options["call_marks"], options["json_schema"]) == (["<tool_call>"], "{}")
    # A broken call would be neither an answer in the form nor a call.
    assert json.loads(options["call_schema"])["$defs"]["0"] == {"type": "object"}
    for template, inputs in (
        ("{{ tools }}<|python_tag|>", FULL),
        ("{{ tools }}<tool_call>", FULL[:3]),
    ):
        with pytest.raises(ToolsError, match="tools cannot be combined"):
            place(template, info(*inputs), [tool], **form)
    strict = {"type": "function", "function": {"name": "add", "strict": True}}
    options = place("{{ tools }}<tool_call>", info(*FULL), [strict])
    assert options["call_marks"] == ["<tool_call>"]
    assert '"additionalProperties": false' in options["call_schema"]
    # Without constraints, or in a form that is no JSON, the model is trusted.
    assert "call_schema" not in place("{{ tools }}<tool_call>", info(*FULL[:3]), [strict])
    assert "call_schema" not in place("{{ tools }}<arg_key>", info(*FULL), [strict])


@pytest.mark.parametrize("parser", [p for p in PARSERS if p.opens], ids=lambda parser: parser.name)
def test_a_call_beside_a_form_is_json_after_the_mark_of_any_family(parser: ToolParser) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {}}}}
    formats = Prompts("{{ tools }}").formats(parser.name)
    tools = Tools.of({**HELLO, "tools": [tool]})
    assert tools is not None
    asked = tools.options({**HELLO, "json_schema": "{}"})
    options = asyncio.run(formats.place(info(*FULL), asked, tools))
    assert options["call_marks"] == list(parser.opens)
    call, end = '{"name": "add", "arguments": {"a": 1}}', "</what families end one with>"
    reader = asyncio.run(formats.readers(info(*FULL), tools, options))
    assert reader is not None
    for mark in parser.opens:
        for text in (f"{mark}{call}", f"{mark}\n[{call}, {call}]", f"{mark}{call}\n{mark}{call}"):
            found = read_calls(reader(), Completion(text + ("" if parser.json_calls else end)))
            assert [each.name for each in found.tool_calls] == ["add"] * text.count("add")
            assert found.text == ""
        # One that is cut short is content, as ever.
        found = read_calls(reader(), Completion(f"{mark}{call[:-1]}", "length"))
        assert not found.tool_calls


def test_a_parser_says_what_it_finds() -> None:
    def parser(**more: Any) -> ToolParser:
        return ToolParser(name="x", summary="", reader=lambda names: reader("think"),
                          suits=lambda template: 1, **more)  # fmt: skip

    assert parser().calls
    for wrong in ({"calls": False}, {"thinking": ("<a>",)}, {"thinking": ("<a>", "")}):
        with pytest.raises(PluginError, match="'x'"):
            parser(**wrong)
