"""The bodies that agent frameworks send, to a model whose chat template has no place for tools.

Taken from the wire: openai-agents 0.24, pydantic-ai 2.68, both with openai 3.57. They leave
``tool_choice`` at auto, and send the answer back in the form in which their framework keeps it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmserve.client import Completion, ModelInfo
from llmserve.errors import UsageError
from llmserve.plugin import Address
from llmserve.testing import ScriptedTriton
from llmserve_gateway.commands import read_prompt
from llmserve_gateway.gateway import Settings
from llmserve_gateway.replicas import Replicas

from .gateways import NO_TRITON, Triton, request_via

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Tokyo"}}</tool_call>'
PARAMETERS = {
    "properties": {"city": {"title": "City", "type": "string"}},
    "required": ["city"],
    "title": "get_weather_args",
    "type": "object",
    "additionalProperties": False,
}
FUNCTION = {
    "name": "get_weather",
    "description": "Look up the weather.",
    "parameters": PARAMETERS,
    "strict": True,
}
CHAT_TOOLS: Any = [{"type": "function", "function": FUNCTION}]
RESPONSE_TOOLS: Any = [{"type": "function", **FUNCTION}]
SYSTEM = {"content": "You help.", "role": "system"}
USER = {"content": "How is Tokyo?", "role": "user"}
ARGUMENTS = '{"city": "Tokyo"}'
ANSWERED: Any = [
    {"role": "assistant", "content": "Let me see.", "tool_calls": [
        {"id": "kbo2JNfjF", "type": "function",
         "function": {"name": "get_weather", "arguments": ARGUMENTS}}]},
    {"role": "tool", "tool_call_id": "kbo2JNfjF", "content": "Sunny."},
]  # fmt: skip
FRAMEWORKS: dict[str, tuple[str, dict[str, Any], str, list[Any]]] = {
    "openai-agents, chat": (
        "/v1/chat/completions", {"messages": [SYSTEM, USER], "tools": CHAT_TOOLS},
        "messages", ANSWERED,
    ),
    "openai-agents, responses": (
        "/v1/responses",
        {"include": [], "input": [USER], "instructions": "You help.", "tools": RESPONSE_TOOLS},
        "input",
        [
            {"id": "msg_1", "role": "assistant", "status": "completed", "type": "message",
             "content": [{"annotations": [], "text": "Let me see.", "type": "output_text",
                          "logprobs": []}]},
            {"arguments": ARGUMENTS, "call_id": "M4SVSOLJz", "name": "get_weather",
             "type": "function_call", "id": "fc_1", "status": "completed"},
            {"call_id": "M4SVSOLJz", "output": "Sunny.", "type": "function_call_output"},
        ],
    ),
    "pydantic-ai, chat": (
        "/v1/chat/completions",
        {"stream": False, "messages": [SYSTEM, USER], "tool_choice": "auto", "tools": CHAT_TOOLS},
        "messages", ANSWERED,
    ),
    "pydantic-ai, responses": (
        "/v1/responses",
        {"stream": False, "input": [SYSTEM, USER], "tool_choice": "auto", "tools": RESPONSE_TOOLS},
        "input",
        [
            {"role": "assistant", "content": "Let me see."},
            {"name": "get_weather", "arguments": ARGUMENTS, "call_id": "M4SVSOLJz",
             "type": "function_call"},
            {"type": "function_call_output", "call_id": "M4SVSOLJz", "output": "Sunny."},
        ],
    ),
    "anthropic, tool_runner": (
        "/v1/messages",
        {"max_tokens": 200, "system": "You help.", "messages": [USER], "tools": [
            {"name": "get_weather", "description": "Look up the weather.",
             "input_schema": PARAMETERS}]},
        "messages",
        [
            {"role": "assistant", "content": [
                {"text": "Let me see.", "type": "text"},
                {"id": "M4SVSOLJz", "input": {"city": "Tokyo"}, "name": "get_weather",
                 "type": "tool_use"}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "M4SVSOLJz", "content": "Sunny."}]},
        ],
    ),
}  # fmt: skip


class PlainTriton(Triton):
    """A model that calls the function, and repeats its result; it accepts nothing but messages."""

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        tensors: Any = {"text_input": None, "text_output": None, "messages": None}
        return ModelInfo(name, "unary", False, None, tensors, tensors, "0.1")

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        if options.get("prompt_only"):
            about = {
                "ids": [],
                "text": "",
                "context_length": 512,
                "chat_template": "{{ messages }}",
            }
            return Completion(json.dumps(about), "stop", 0, 0)
        self.requests.append(options)
        result = options["messages"][-1]["content"].partition("<tool_response>\n")[2]
        answer = result.partition("\n</tool_response>")[0] or f"Let me see.\n{CALL}"
        return Completion(answer, "stop", 2, 1)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_agent_calls_a_function_and_gets_its_result(
    framework: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, body, name, answered = FRAMEWORKS[framework]
    triton = PlainTriton()
    first = request_via(triton, path, json={"model": "m", **body}).json()
    assert '"get_weather"' in json.dumps(first)
    assert "Tokyo" in json.dumps(first)
    assert "tool_call>" not in json.dumps(first)
    second = request_via(
        triton, path, json={"model": "m", **body, name: [*body[name], *answered]}
    ).json()
    assert '"Sunny."' in json.dumps(second)
    for options in triton.requests:
        system, user, *rest = options["messages"]
        assert system["content"].startswith("You help.\n\nYou can call these functions:\n")
        assert "- get_weather(city: string): Look up the weather.\n" in system["content"]
        assert user == {"role": "user", "content": "How is Tokyo?"}
        assert options.keys() <= {
            "messages", "max_tokens", "fill_context", "timeout", "session", "x-request-id",
        }  # fmt: skip
    assert rest == [
        {"role": "assistant", "content": f"Let me see.\n{CALL}"},
        {"role": "user", "content": "<tool_response>\nSunny.\n</tool_response>"},
    ]
    assert "unknown request fields" not in caplog.text


def test_the_text_can_be_set_and_its_use_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    path, body, *_ = FRAMEWORKS["openai-agents, chat"]
    triton = PlainTriton()
    settings = Settings(NO_TRITON, tool_prompt="Use: {tools}")
    request_via(triton, path, settings=settings, times=3, json={"model": "m", **body})
    for options in triton.requests:
        assert options["messages"][0]["content"].startswith("You help.\n\nUse: - get_weather(")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the chat template of 'm' has no place for tools" in line
    assert "--tool-prompt" in line


def test_a_conversation_with_calls_asks_for_the_template_once() -> None:
    about = {"ids": [], "text": "", "context_length": 512, "chat_template": "{{ tools }}"}
    models = {"m": "stream"}
    scripted = ScriptedTriton([json.dumps(about)], models=models, inputs=["chat_template_kwargs"])
    path, body, name, answered = FRAMEWORKS["openai-agents, chat"]
    request = {"model": "m", **body, name: [*body[name], *answered]}
    with scripted.serving() as url:
        for _ in range(2):
            assert request_via(Replicas([Address(url)]), path, json=request).status_code == 200
    assert [bool(messages) for messages in scripted.messages] == [False, True] * 2


def test_a_text_that_lists_no_tools_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    for content in (b"Call what you like.", b"\xff{tools}"):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="--tool-prompt"):
            read_prompt(file)
    file.write_text("\nUse {tools}\n", encoding="utf-8")
    assert read_prompt(file) == "Use {tools}"
