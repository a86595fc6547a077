"""Tools, by the official client: calls that have to be made, and those a model makes by itself."""

from __future__ import annotations

import functools
import json
import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from llmserve.demo import demo_model_path
from llmserve.errors import UsageError
from llmserve.testing import LiveTriton
from tests.support import install

from .process import Gateway
from .scripted.scripted_model import OVER, SAY
from .test_gateway_dialects_live import events

CHAT: list[Any] = [{"role": "user", "content": "What is the capital of Japan?"}]


class Weather(pydantic.BaseModel):
    """Look up the weather."""

    city: Literal["Tokyo", "Paris"]
    days: Literal[1, 2]


class Inner(pydantic.BaseModel):
    flag: bool


class Nested(pydantic.BaseModel):
    inner: Inner


TOOLS: list[Any] = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Nested)]

# As Qwen's template has them: the tools, then what was called, then what came of it.
HERMES = """{% if tools %}{% for tool in tools %}{{ tool|tojson }}{% endfor %}{% endif %}
{%- for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>
{{ c.function|tojson }}
</tool_call>{% endfor %}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"""
CALL = """Let me see.
<tool_call>
{"name": "Weather", "arguments": {"city": "Tokyo", "days": 1}}
</tool_call>"""
CALLS = f"""{CALL}
<tool_call>
{{"name": "Nested", "arguments": {{"inner": {{"flag": true}}}}}}
</tool_call>"""


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": f"{SAY}{text}{OVER}"}]


@pytest.fixture(scope="module")
def playing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveTriton]:
    """A Triton that knows the scripted plugin, which only this module has installed."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, "scripted-model", "[llmserve.api2]\nscripted = scripted_model\n")
    with pytest.MonkeyPatch.context() as patch:
        for place in (folder, Path(__file__).with_name("scripted")):
            patch.syspath_prepend(place)
            path = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))
            patch.setenv("PYTHONPATH", path)
        with LiveTriton.start(tmp_path_factory.mktemp("triton") / "models") as live:
            yield live


def play(live: LiveTriton, folder: Path, name: str, template: str) -> str:
    """Build a model with a chat template of its own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return live.build("scripted", str(folder), name=name, decoupled=True)


@pytest.fixture(scope="module")
def hermes(playing: LiveTriton, tmp_path_factory: pytest.TempPathFactory) -> str:
    return play(playing, tmp_path_factory.mktemp("hermes"), "hermes", HERMES)


@pytest.fixture(scope="module")
def desk(playing: LiveTriton) -> Iterator[Gateway]:
    started = Gateway(playing)
    yield started
    started.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_held_to_a_call(gateway: Gateway, model: str, stream: bool) -> None:
    client: Any = gateway.client().chat.completions
    for choice in ("required", {"type": "function", "function": {"name": "Nested"}}):
        asked: dict[str, Any] = {"model": model, "messages": CHAT, "tools": TOOLS,
                                 "tool_choice": choice, "parallel_tool_calls": False,
                                 "max_tokens": 450}  # fmt: skip
        if stream:
            with client.stream(**asked) as events:
                found = events.get_final_completion()
        else:
            found = client.parse(**asked)
        (told,) = found.choices
        (call,) = told.message.tool_calls
        assert told.finish_reason == "tool_calls"
        assert not told.message.content
        assert isinstance(call.function.parsed_arguments, (Weather, Nested))
        assert choice == "required" or call.function.name == "Nested"
        assert stream or found.usage


def test_the_client_of_llmserve_asks_for_calls_and_reads_them(
    triton: LiveTriton, model: str, playing: LiveTriton, hermes: str
) -> None:
    asked: dict[str, Any] = {"messages": CHAT, "tools": TOOLS, "max_tokens": 450}
    for choice in ("required", {"type": "function", "function": {"name": "Nested"}}):
        held = triton.client.generate(model, tool_choice=choice, parallel_tool_calls=False, **asked)
        (call,) = held.tool_calls
        assert (held.text, held.finish_reason) == ("", "tool_calls")
        form: type[pydantic.BaseModel] = Weather if call.name == "Weather" else Nested
        assert form.model_validate_json(call.arguments)
        assert choice == "required" or call.name == "Nested"
    cut = triton.client.generate(model, tool_choice="required", **{**asked, "max_tokens": 5})
    assert (cut.finish_reason, cut.tool_calls) == ("length", ())
    assert cut.text
    with pytest.raises(UsageError, match="no place for tools"):
        triton.client.generate(model, **asked)
    free = playing.client.generate(hermes, messages=say(CALLS), tools=TOOLS, max_tokens=300)
    assert [call.name for call in free.tool_calls] == ["Weather", "Nested"]
    assert (free.text, free.finish_reason) == ("Let me see.", "tool_calls")


def test_a_call_that_is_cut_short_is_text(gateway: Gateway, model: str) -> None:
    found = gateway.client().chat.completions.create(
        model=model, messages=CHAT, tools=TOOLS, tool_choice="required", max_tokens=5
    )
    (told,) = found.choices
    assert (told.finish_reason, told.message.tool_calls) == ("length", None)
    assert told.message.content


def test_what_cannot_be_done_says_why(
    gateway: Gateway, model: str, desk: Gateway, hermes: str
) -> None:
    """The demo model is not told of tools, and the scripted one cannot be held to a call."""
    for front, name, choice, param in (
        (gateway, model, "auto", "tools"),
        (desk, hermes, "required", "tool_choice"),
    ):
        client: Any = front.client().chat.completions
        with pytest.raises(openai.BadRequestError) as caught:
            client.create(model=name, messages=CHAT, tools=TOOLS, tool_choice=choice)
        assert caught.value.param == param


def test_a_model_calls_by_itself(desk: Gateway, hermes: str) -> None:
    client: Any = desk.client().chat.completions
    asked: Any = {"model": hermes, "messages": say(CALLS), "tools": TOOLS, "max_tokens": 300}
    whole = client.parse(**asked).choices[0]
    calls = [call.function for call in whole.message.tool_calls or ()]
    assert [call.parsed_arguments for call in calls] == [
        Weather(city="Tokyo", days=1),
        Nested(inner=Inner(flag=True)),
    ]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "Let me see.")
    with client.stream(**asked, n=2) as events:
        seen = list(events)
        final = events.get_final_completion()
    for told in final.choices:
        streamed = [call.function for call in told.message.tool_calls or ()]
        assert [(c.name, c.arguments) for c in streamed] == [(c.name, c.arguments) for c in calls]
        assert (told.finish_reason, told.message.content) == ("tool_calls", "Let me see.")
    # They come in pieces, not at the end.
    deltas = [event for event in seen if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 8


def test_what_was_called_goes_back_to_the_model(desk: Gateway, hermes: str) -> None:
    client: Any = desk.client().chat.completions
    asked: Any = {"model": hermes, "tools": TOOLS, "max_tokens": 300}
    first = client.create(**asked, messages=say(CALLS)).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"{SAY}Sunny.{OVER}"}
        for call in first.tool_calls or ()
    ]
    talk: Any = [*say(CALLS), first.model_dump(exclude_none=True), *results]
    second = client.create(**asked, messages=talk).choices[0]
    assert (second.message.content, second.message.tool_calls) == ("Sunny.", None)
    assert second.finish_reason == "stop"
    read = desk.post("/tokenize", {"model": hermes, "messages": talk, "tools": TOOLS}).json()
    text = desk.post("/detokenize", {"model": hermes, "tokens": read["tokens"]}).json()["prompt"]
    assert json.dumps(TOOLS[0]["function"]["name"]) in text
    assert '"arguments": {"city": "Tokyo", "days": 1}' in text


def test_the_other_dialects_have_tools_as_well(desk: Gateway, hermes: str) -> None:
    """Whole and streamed: Anthropic's blocks, and the items of a response."""
    named = {"name": "Weather", "description": "", "input_schema": {"type": "object"}}
    asked: dict[str, Any] = {"model": hermes, "max_tokens": 300, "messages": say(CALL),
                             "tools": [named]}  # fmt: skip
    whole = desk.post("/v1/messages", asked).json()
    text, use = whole["content"]
    assert (text["text"], use["name"], use["input"]) == (
        "Let me see.", "Weather", {"city": "Tokyo", "days": 1},
    )  # fmt: skip
    assert whole["stop_reason"] == "tool_use"
    told = list(events(desk, "/v1/messages", asked))
    written = "".join(one["delta"].get("partial_json", "") for kind, one in told
                      if kind == "content_block_delta")  # fmt: skip
    assert json.loads(written) == use["input"]
    begun = [one["content_block"]["type"] for kind, one in told if kind == "content_block_start"]
    assert begun == ["text", "tool_use"]

    function = {"type": "function", "name": "Weather", "parameters": {"type": "object"}}
    talk = say(CALL)
    client: Any = desk.client().responses
    given: Any = {"model": hermes, "input": talk, "tools": [function], "max_output_tokens": 300}
    response = client.create(**given)
    kinds = [item.type for item in response.output]
    assert kinds == ["message", "function_call"]
    assert json.loads(response.output[1].arguments) == use["input"]
    final = [event for event in client.create(**given, stream=True)][-1].response
    assert [item.type for item in final.output] == kinds
    assert final.output[1].arguments == response.output[1].arguments
    again = [*talk, *(item.model_dump() for item in response.output),
             {"type": "function_call_output", "call_id": response.output[1].call_id,
              "output": f"{SAY}Sunny.{OVER}"}]  # fmt: skip
    assert client.create(**{**given, "input": again}).output_text == "Sunny."


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call_is_content(desk: Gateway, hermes: str, stream: bool) -> None:
    text = '<tool_call>{"name": "Unknown", "arguments": {}}</tool_call> {'
    asked: Any = {"model": hermes, "messages": say(text), "tools": TOOLS}
    client: Any = desk.client().chat.completions
    if not stream:
        told = client.create(**asked).choices[0].message.content
    else:
        chunks = client.create(**asked, stream=True)
        told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert told == text
    assert client.create(**asked, tool_choice="none").choices[0].message.content == text


def test_a_third_party_brings_its_parser(
    playing: LiveTriton, desk: Gateway, tmp_path: Path, hermes: str
) -> None:
    """Chosen by the template, and for a model that another would fit by the gateway's option."""
    shouts = play(playing, tmp_path, "shouts", HERMES + "shout")
    told = Gateway(playing, "--tool-parser", f"{hermes}=shouts")
    for front, name in ((desk, shouts), (told, hermes)):
        client: Any = front.client().chat.completions
        found = client.create(model=name, messages=say("Weather!"), tools=TOOLS)
        assert found.choices[0].message.tool_calls[0].function.name == "Weather"
    assert told.stop() == 0


def test_langchain_binds_tools_and_structures_answers(
    gateway: Gateway, model: str, desk: Gateway, hermes: str
) -> None:
    from langchain_openai import ChatOpenAI

    def chat(front: Gateway, name: str) -> Any:
        told: Any = {"base_url": front.url, "api_key": "none", "model": name, "max_tokens": 300}
        return ChatOpenAI(**told)

    for method in ("function_calling", "json_schema"):
        form = chat(gateway, model).with_structured_output(Weather, method=method)
        assert isinstance(form.invoke("How is Tokyo?"), Weather)
    bound = chat(desk, hermes).bind_tools([Weather, Nested])
    question = say(CALLS)[0]["content"]
    gathered = functools.reduce(operator.add, bound.stream(question))
    for told in (bound.invoke(question), gathered):
        assert [call["args"] for call in told.tool_calls] == [
            {"city": "Tokyo", "days": 1},
            {"inner": {"flag": True}},
        ]
        assert told.content == "Let me see."
