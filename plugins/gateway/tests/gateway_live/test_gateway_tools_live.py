"""Tools, with the official client: calls that are required, and those that a model chooses."""

from __future__ import annotations

import functools
import importlib
import json
import operator
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from llmserve import errors
from llmserve.contract.failures import FAILURES
from llmserve.plugin import demo_model_path
from llmserve.testing import LiveTriton
from llmserve.testing.codes import installed_sources, raised_codes

from .process import Gateway
from .scripted.scripted_model import END, START
from .test_gateway_dialects_live import events

pytestmark = pytest.mark.long

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

# Like Qwen's template: the tools, then the calls, then their results.
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


# Like Qwen3's: the answer begins within the thinking, unless that is turned off.
THINKER = (
    HERMES
    + """{% if add_generation_prompt %}[assistant]
{%- if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""
)
THOUGHT = "Two and two?\n\nFour."


def script(text: str) -> list[Any]:
    return [{"role": "user", "content": f"{START}{text}{END}"}]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveTriton]:
    """A Triton with the scripted plugin, which only this module installs."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "scripted_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-model\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[llmserve.api3]\nscripted = scripted_model\n")
    with pytest.MonkeyPatch.context() as patch:
        for entry in (folder, Path(__file__).with_name("scripted")):
            patch.syspath_prepend(entry)
            path = os.pathsep.join(filter(None, [str(entry), os.environ.get("PYTHONPATH")]))
            patch.setenv("PYTHONPATH", path)
        with LiveTriton.start(tmp_path_factory.mktemp("triton") / "models") as live:
            yield live


def build_model(live: LiveTriton, folder: Path, name: str, template: str = "") -> str:
    """Build a scripted model with the given chat template, or the demo model's."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return live.build("scripted", str(folder), name=name, decoupled=True)


@pytest.fixture(scope="module")
def hermes(scripted: LiveTriton, tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_model(scripted, tmp_path_factory.mktemp("hermes"), "hermes", HERMES)


@pytest.fixture(scope="module")
def plain(scripted: LiveTriton, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose chat template has no place for tools."""
    return build_model(scripted, tmp_path_factory.mktemp("plain"), "plain")


@pytest.fixture(scope="module")
def thinker(scripted: LiveTriton, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose answers begin within its thinking."""
    return build_model(scripted, tmp_path_factory.mktemp("thinker"), "thinker", THINKER)


@pytest.fixture(scope="module")
def thinking_demo(triton: LiveTriton, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model, whose engine can be constrained, with a template that opens the thinking."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("demo") / "model"
    shutil.copytree(demo_model_path(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = THINKER
    tokenizer.save_pretrained(folder)
    return triton.build("hf", str(folder), name="thinking-demo")


@pytest.fixture(scope="module")
def front(scripted: LiveTriton) -> Iterator[Gateway]:
    process = Gateway(scripted)
    yield process
    process.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_constrained_to_a_call(gateway: Gateway, model: str, stream: bool) -> None:
    client: Any = gateway.client().chat.completions
    for choice in ("required", {"type": "function", "function": {"name": "Nested"}}):
        request: dict[str, Any] = {"model": model, "messages": CHAT, "tools": TOOLS,
                                   "tool_choice": choice, "parallel_tool_calls": False,
                                   "max_tokens": 300}  # fmt: skip
        if stream:
            with client.stream(**request) as events:
                answer = events.get_final_completion()
        else:
            answer = client.parse(**request)
        (result,) = answer.choices
        (call,) = result.message.tool_calls
        assert result.finish_reason == "tool_calls"
        assert not result.message.content
        assert isinstance(call.function.parsed_arguments, (Weather, Nested))
        assert choice == "required" or call.function.name == "Nested"
        assert stream or answer.usage


def test_llmserves_client_requests_and_parses_calls(
    triton: LiveTriton, model: str, scripted: LiveTriton, hermes: str, plain: str
) -> None:
    request: dict[str, Any] = {"messages": CHAT, "tools": TOOLS, "max_tokens": 300}
    for choice in ("required", {"type": "function", "function": {"name": "Nested"}}):
        options: dict[str, Any] = {**request, "tool_choice": choice, "parallel_tool_calls": False}
        answer = triton.client.generate(model, **options)
        (call,) = answer.tool_calls
        assert (answer.text, answer.finish_reason) == ("", "tool_calls")
        schema: type[pydantic.BaseModel] = Weather if call.name == "Weather" else Nested
        assert schema.model_validate_json(call.arguments)
        assert choice == "required" or call.name == "Nested"
    cut = triton.client.generate(model, tool_choice="required", **{**request, "max_tokens": 5})
    assert (cut.finish_reason, cut.tool_calls) == ("length", ())
    assert cut.text
    for name in (hermes, plain):
        asked = script(CALLS)
        free = scripted.client.generate(name, messages=asked, tools=TOOLS, max_tokens=300)
        assert [call.name for call in free.tool_calls] == ["Weather", "Nested"]
        assert (free.text, free.finish_reason) == ("Let me see.", "tool_calls")
        calls = [
            {
                "id": call.id,
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in free.tool_calls
        ]
        talk = [*asked, {"role": "assistant", "content": free.text, "tool_calls": calls},
                {"role": "tool", "content": f"{START}Sunny.{END}"}]  # fmt: skip
        assert scripted.client.generate(name, messages=talk, tools=TOOLS).text == "Sunny."


def test_a_call_that_is_cut_short_is_text(gateway: Gateway, model: str) -> None:
    answer = gateway.client().chat.completions.create(
        model=model, messages=CHAT, tools=TOOLS, tool_choice="required", max_tokens=5
    )
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content


def test_a_call_that_an_engine_cannot_force_may_be_asked_for(
    front: Gateway, hermes: str, plain: str
) -> None:
    """The scripted engine has no constraints; the error names what works, and that works."""
    for name in (hermes, plain):
        client: Any = front.client().chat.completions
        with pytest.raises(openai.BadRequestError, match='set tool_choice to "auto"') as caught:
            client.create(model=name, messages=CHAT, tools=TOOLS, tool_choice="required")
        assert caught.value.param == "tool_choice"
        request: Any = {"model": name, "messages": script(CALL), "tools": TOOLS, "max_tokens": 300}
        answer = client.create(**request, tool_choice="auto").choices[0]
        assert answer.message.tool_calls[0].function.name == "Weather"


@pytest.mark.parametrize("form", ["hermes", "plain"])
def test_a_model_calls_on_its_own(
    front: Gateway, form: str, request: pytest.FixtureRequest
) -> None:
    name = request.getfixturevalue(form)
    client: Any = front.client().chat.completions
    body: Any = {"model": name, "messages": script(CALLS), "tools": TOOLS, "max_tokens": 300}
    whole = client.parse(**body).choices[0]
    calls = [call.function for call in whole.message.tool_calls or ()]
    assert [call.parsed_arguments for call in calls] == [
        Weather(city="Tokyo", days=1),
        Nested(inner=Inner(flag=True)),
    ]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "Let me see.")
    with client.stream(**body, n=2) as events:
        received = list(events)
        final = events.get_final_completion()
    for choice in final.choices:
        streamed = [call.function for call in choice.message.tool_calls or ()]
        assert [(c.name, c.arguments) for c in streamed] == [(c.name, c.arguments) for c in calls]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    # Arguments are streamed in pieces, not sent at the end.
    deltas = [event for event in received if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 8


def test_calls_and_their_results_go_back_to_the_model(front: Gateway, hermes: str) -> None:
    client: Any = front.client().chat.completions
    request: Any = {"model": hermes, "tools": TOOLS, "max_tokens": 300}
    first = client.create(**request, messages=script(CALLS)).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"{START}Sunny.{END}"}
        for call in first.tool_calls or ()
    ]
    talk: Any = [*script(CALLS), first.model_dump(exclude_none=True), *results]
    second = client.create(**request, messages=talk).choices[0]
    assert (second.message.content, second.message.tool_calls) == ("Sunny.", None)
    assert second.finish_reason == "stop"
    prompt = front.post("/tokenize", {"model": hermes, "messages": talk, "tools": TOOLS}).json()
    text = front.post("/detokenize", {"model": hermes, "tokens": prompt["tokens"]}).json()["prompt"]
    assert json.dumps(TOOLS[0]["function"]["name"]) in text
    assert '"arguments": {"city": "Tokyo", "days": 1}' in text


@pytest.mark.parametrize("form", ["hermes", "plain"])
def test_the_other_dialects_have_tools_as_well(
    front: Gateway, form: str, request: pytest.FixtureRequest
) -> None:
    """Anthropic's blocks, and the items of a response, complete and streamed."""
    name = request.getfixturevalue(form)
    tool = {"name": "Weather", "description": "", "input_schema": {"type": "object"}}
    message: dict[str, Any] = {"model": name, "max_tokens": 300, "messages": script(CALL),
                               "tools": [tool]}  # fmt: skip
    whole = front.post("/v1/messages", message).json()
    text, use = whole["content"]
    assert (text["text"], use["name"], use["input"]) == (
        "Let me see.", "Weather", {"city": "Tokyo", "days": 1},
    )  # fmt: skip
    assert whole["stop_reason"] == "tool_use"
    stream = list(events(front, "/v1/messages", message))
    arguments = "".join(event["delta"].get("partial_json", "") for kind, event in stream
                        if kind == "content_block_delta")  # fmt: skip
    assert json.loads(arguments) == use["input"]
    starts = [event for kind, event in stream if kind == "content_block_start"]
    assert [event["content_block"]["type"] for event in starts] == ["text", "tool_use"]

    function = {"type": "function", "name": "Weather", "parameters": {"type": "object"}}
    talk = script(CALL)
    client: Any = front.client().responses
    body: Any = {"model": name, "input": talk, "tools": [function], "max_output_tokens": 300}
    response = client.create(**body)
    kinds = [item.type for item in response.output]
    assert kinds == ["message", "function_call"]
    assert json.loads(response.output[1].arguments) == use["input"]
    final = [event for event in client.create(**body, stream=True)][-1].response
    assert [item.type for item in final.output] == kinds
    assert final.output[1].arguments == response.output[1].arguments
    talk += [*(item.model_dump() for item in response.output),
             {"type": "function_call_output", "call_id": response.output[1].call_id,
              "output": f"{START}Sunny.{END}"}]  # fmt: skip
    assert client.create(**{**body, "input": talk}).output_text == "Sunny."


@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_call_is_content(front: Gateway, hermes: str, stream: bool) -> None:
    text = '<tool_call>{"name": "Unknown", "arguments": {}}</tool_call> {'
    request: Any = {"model": hermes, "messages": script(text), "tools": TOOLS}
    client: Any = front.client().chat.completions
    if not stream:
        content = client.create(**request).choices[0].message.content
    else:
        chunks = client.create(**request, stream=True)
        content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert content == text
    assert client.create(**request, tool_choice="none").choices[0].message.content == text


def test_a_third_party_plugin_adds_a_parser(
    scripted: LiveTriton, front: Gateway, tmp_path: Path, hermes: str
) -> None:
    """It is chosen by the template, or by an option for a model that another parser suits."""
    shouts = build_model(scripted, tmp_path, "shouts", HERMES + "shout")
    configured = Gateway(scripted, "--tool-parser", f"{hermes}=shouts")
    for server, name in ((front, shouts), (configured, hermes)):
        client: Any = server.client().chat.completions
        answer = client.create(model=name, messages=script("Weather!"), tools=TOOLS)
        assert answer.choices[0].message.tool_calls[0].function.name == "Weather"
    assert configured.stop() == 0


def test_langchain_binds_tools_and_structures_answers(
    gateway: Gateway, model: str, front: Gateway, hermes: str
) -> None:
    from langchain_openai import ChatOpenAI

    def chat(server: Gateway, name: str) -> Any:
        options: Any = {"base_url": server.url, "api_key": "none", "model": name, "max_tokens": 300}
        return ChatOpenAI(**options)

    for method in ("function_calling", "json_schema"):
        structured = chat(gateway, model).with_structured_output(Weather, method=method)
        assert isinstance(structured.invoke("How is Tokyo?"), Weather)
    bound = chat(front, hermes).bind_tools([Weather, Nested])
    question = script(CALLS)[0]["content"]
    streamed = functools.reduce(operator.add, bound.stream(question))
    for message in (bound.invoke(question), streamed):
        assert [call["args"] for call in message.tool_calls] == [
            {"city": "Tokyo", "days": 1},
            {"inner": {"flag": True}},
        ]
        assert message.content == "Let me see."


def test_a_chat_tells_the_thinking_from_the_answer(
    scripted: LiveTriton, front: Gateway, thinker: str
) -> None:
    client: Any = front.client().chat.completions
    request: Any = {"model": thinker, "messages": script(f"{THOUGHT}\n</think>\n\n{CALLS}"),
                    "tools": TOOLS, "max_tokens": 400}  # fmt: skip
    whole = client.create(**request)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, "Let me see.")
    assert message.reasoning == message.reasoning_content
    assert [call.function.name for call in message.tool_calls] == ["Weather", "Nested"]
    chunks = list(client.create(**request, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    reasoning = [delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")]
    assert "".join(reasoning) == THOUGHT
    assert len(reasoning) > 3
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    assert chunks[0].choices[0].delta.role == "assistant"
    for usage in (whole.usage, chunks[-1].usage):
        assert 4 <= usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens - 20
    cut = client.create(**{**request, "max_tokens": 6}).choices[0]
    assert THOUGHT.startswith(cut.message.reasoning_content)
    assert (cut.finish_reason, cut.message.content) == ("length", "")
    # The prompt closes the thinking, so all is answer.
    off: Any = {"model": thinker, "messages": script("Four.")}
    for body in ({"reasoning_effort": "none"},
                 {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):  # fmt: skip
        answer = client.create(**off, **body).choices[0].message
        assert (answer.content, getattr(answer, "reasoning_content", None)) == ("Four.", None)
    ours = scripted.client.generate(**request)
    assert (ours.reasoning, ours.text, len(ours.tool_calls)) == (THOUGHT, "Let me see.", 2)
    pieces = list(scripted.client.stream(thinker, messages=script(f"{THOUGHT}</think>Four.")))
    assert "".join(piece.reasoning for piece in pieces) == THOUGHT
    assert "".join(piece.text for piece in pieces) == "Four."


def test_thinking_has_blocks_and_items_of_its_own(front: Gateway, thinker: str) -> None:
    """Anthropic's and OpenAI's newer API, with their clients, and back in the next turn."""
    said = script(f"{THOUGHT}</think>{CALL}")
    anthropic = importlib.import_module("anthropic").Anthropic(base_url=front.root, api_key="none")
    tool = {"name": "Weather", "input_schema": {"type": "object"}}
    body: Any = {"model": thinker, "max_tokens": 400, "messages": said, "tools": [tool],
                 "thinking": {"type": "enabled", "budget_tokens": 1024}}  # fmt: skip
    whole = anthropic.messages.create(**body)
    with anthropic.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thought, text, use = message.content
        assert (thought.thinking, text.text, use.name) == (THOUGHT, "Let me see.", "Weather")
    assert streamed.content[0] == whole.content[0]
    back = [*said, {"role": "assistant", "content": [b.model_dump() for b in whole.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id,
             "content": f"{START}</think>Sunny.{END}"}]}]  # fmt: skip
    assert anthropic.messages.create(**{**body, "messages": back}).content[0].text == "Sunny."
    off = {**body, "messages": script("Four."), "thinking": {"type": "disabled"}}
    assert anthropic.messages.create(**off).content[0].text == "Four."

    client: Any = front.client().responses
    function = {"type": "function", "name": "Weather", "parameters": {}}
    request: Any = {"model": thinker, "input": said, "max_output_tokens": 400, "tools": [function]}
    response = client.create(**request)
    with client.stream(**request) as received:
        kinds = [event.type for event in received]
        final = received.get_final_response()
    for answer in (response, final):
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert answer.output[0].content[0].text == THOUGHT
        assert answer.output_text == "Let me see."
    assert kinds.count("response.reasoning_text.delta") > 3
    assert kinds.count("response.reasoning_text.done") == 1
    assert response.usage.output_tokens_details.reasoning_tokens > 3
    talk = [*said, *(item.model_dump() for item in response.output),
            {"type": "function_call_output", "call_id": response.output[-1].call_id,
             "output": f"{START}</think>Sunny.{END}"}]  # fmt: skip
    assert client.create(**{**request, "input": talk}).output_text == "Sunny."


def test_thinking_is_refused_where_there_is_none(front: Gateway, hermes: str, thinker: str) -> None:
    budget = {"extra_body": {"thinking_token_budget": 5}}
    client: Any = front.client().chat.completions
    for name, why in ((hermes, "does not think"), (thinker, "cannot be made to end its thinking")):
        with pytest.raises(openai.BadRequestError, match=why) as caught:
            client.create(model=name, messages=CHAT, **budget)
        assert caught.value.param == "thinking_token_budget"
    body = {"model": hermes, "messages": CHAT, "max_tokens": 5,
            "thinking": {"type": "enabled", "budget_tokens": 1024}}  # fmt: skip
    answer = front.post("/v1/messages", body)
    assert answer.status_code == 400
    assert "thinking: 'hermes' does not think" in answer.json()["error"]["message"]


def test_a_form_begins_after_the_thinking(gateway: Gateway, thinking_demo: str) -> None:
    client: Any = gateway.client().chat.completions
    answer = client.parse(
        model=thinking_demo, messages=CHAT, response_format=Weather, temperature=1, seed=1,
        max_tokens=200, extra_body={"thinking_token_budget": 7},
    ).choices[0].message  # fmt: skip
    assert isinstance(answer.parsed, Weather)
    assert answer.reasoning_content


def test_a_failure_of_the_runtime_reaches_both_clients_as_itself(
    scripted: LiveTriton, front: Gateway, plain: str
) -> None:
    # The gateway answers nobody after a cancellation.
    refused = raised_codes(installed_sources())
    refused -= {"cancelled", "model_failed"}
    assert len(refused) > 7
    scripts = {code: f"refuse {code}" for code in sorted(refused)} | {"model_failed": "fail"}
    for code, script in scripts.items():
        prompt = f"{START}{script}{END}"
        with pytest.raises(errors.RequestRejectedError) as ours:
            scripted.client.generate(plain, prompt)
        with pytest.raises(openai.APIStatusError) as theirs:
            front.client().completions.create(model=plain, prompt=prompt)
        row, param = FAILURES[code], None if code == "model_failed" else "top_k"
        assert (ours.value.code, ours.value.param) == (code, param)
        assert (theirs.value.status_code, theirs.value.code) == (row.status, row.api_code)
        assert theirs.value.param == param
        assert theirs.value.response.headers.get("retry-after") == (
            None if row.retry_after is None else str(row.retry_after)
        )
