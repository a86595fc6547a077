"""Anthropic's Messages API: ``/v1/messages`` and its ``count_tokens``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.client import Completion, Piece, ToolCall
from llmserve.client.tools import Tools
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.fields import (
    Asked,
    Fields,
    given,
    read_messages,
    read_sampling,
    read_text,
)
from llmserve_gateway.openai_answers import dump
from llmserve_gateway.usage import Usage

_REASONS = {"stop": "end_turn", "length": "max_tokens", "cancelled": "max_tokens",
            "tool_calls": "tool_use"}  # fmt: skip
_CHOICES = {None: None, "auto": "auto", "any": "required", "tool": "required", "none": "none"}
_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}
_TEXT = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":'


def read_messages_request(content: Mapping[str, Any], *, counts: bool = False) -> Asked:
    """Read the body of ``/v1/messages``; one that only ``counts`` needs no ``max_tokens``."""
    fields = Fields(content)
    told = fields.take("messages")
    whole = told if isinstance(told, list) else []
    roles = [one.get("role") for one in whole if isinstance(one, dict)]
    if any(role not in ("user", "assistant") for role in roles):
        raise bad_request("messages are the user's and the assistant's: see system", "messages")
    messages = read_messages([message for one in whole for message in _messages(one)])
    if (system := fields.take("system")) is not None:
        messages.insert(0, {"role": "system", "content": read_text(system, "system")})
    options = read_sampling(fields, "stop_sequences", warmest=1)
    options["max_tokens"] = fields.number("max_tokens", int, 1)
    if options["max_tokens"] is None and not counts:
        raise bad_request("max_tokens has to be a whole number from 1", "max_tokens")
    if fields.mapping("thinking").get("type") not in (None, "disabled"):
        raise bad_request("thinking: this server's models have none apart from their answer",
                          "thinking")  # fmt: skip
    tools = _tools(fields)
    fields.refuse("this server cannot do that", "mcp_servers", "container")
    options = {**given(options), "messages": messages}
    return Asked(
        model=fields.text("model"),
        options=tools.options(options) if tools else options,
        stream=fields.boolean("stream"),
        tells_stop="stop_words" in options and not tools,
        tools=tools,
        unknown=fields.rest(),
    )


def _tools(fields: Fields) -> Tools | None:
    told = fields.take("tools", type="array", items={"type": "object"}) or []
    if not isinstance(told, list):
        raise bad_request("tools has to be a list", "tools")
    functions = []
    for at, tool in enumerate(told):
        if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
            raise bad_request(f"tools[{at}] is none that this server's models can call", "tools")
        schema = {"parameters": tool.get("input_schema")}
        about = tool.get("description")
        about = {"description": about} if isinstance(about, str) else {}
        functions.append({"name": tool.get("name"), **about, **schema})
    choice = fields.mapping("tool_choice")
    kind = choice.get("type")
    if not (kind is None or isinstance(kind, str)) or kind not in _CHOICES:
        raise bad_request("tool_choice has to be auto, any, tool or none", "tool_choice")
    named = choice.get("name") if kind == "tool" else None
    if kind == "tool" and not isinstance(named, str):
        raise bad_request("tool_choice has to name the tool", "tool_choice")
    parallel = choice.get("disable_parallel_tool_use") is not True
    return Tools.checked(functions, _CHOICES[kind], named, parallel=parallel)


def _messages(told: Any) -> list[Any]:
    """Return a message as chats have it: calls and their results are blocks of its content."""
    content = told.get("content") if isinstance(told, dict) else None
    if not isinstance(content, list):
        return [told]

    def blocks(kind: str) -> list[dict[str, Any]]:
        return [one for one in content if isinstance(one, dict) and one.get("type") == kind]

    results = [
        {"role": "tool", "tool_call_id": one.get("tool_use_id"), "content": one.get("content", "")}
        for one in blocks("tool_result")
    ]
    calls = [
        {"id": one.get("id"), "function": {"name": one.get("name"), "arguments": one.get("input")}}
        for one in blocks("tool_use")
    ]
    if not results and not calls:
        return [told]
    rest = [one for one in content if one not in (*blocks("tool_result"), *blocks("tool_use"))]
    if not calls:
        return [*results, *([{**told, "content": rest}] if rest else [])]
    return [*results, {**told, "content": rest or None, "tool_calls": calls}]


class MessageAnswers:
    """Writes an answer as a message, whole or in Anthropic's events."""

    def __init__(self, asked: Asked, request_id: str) -> None:
        self.usage = Usage(1, 1)
        self._stops = asked.options.get("stop_words") or [] if asked.tells_stop else []
        self._end: dict[str, str | None] = {"stop_reason": "end_turn", "stop_sequence": None}
        self._tools = asked.tools
        self._blocks = 0
        self._kind = ""
        self._message: dict[str, Any] = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": asked.model,
            "content": [],
            **dict.fromkeys(self._end),
        }

    def whole(self, answers: Sequence[Completion]) -> bytes:
        answer, calls = answers[0], answers[0].tool_calls
        uses = [{**_use(call), "input": json.loads(call.arguments)} for call in calls]
        self.usage.note(0, answer.input_tokens, answer.output_tokens)
        text = self._told(answer)
        texts = [{"type": "text", "text": text}] if text or not calls else []
        message = {
            **self._message,
            **self._end,
            "content": [*texts, *uses],
            "usage": {"input_tokens": self.usage.read, "output_tokens": self.usage.written},
        }
        return dump(message)

    def opening(self, piece: Piece) -> bytes:
        usage = {"input_tokens": piece.input_tokens or 0, "output_tokens": 0}
        start = _event("message_start", message={**self._message, "usage": usage})
        # Nobody knows yet whether an answer that may be a call has any text.
        text = b"" if self._tools else self._begin({"type": "text", "text": ""})
        return start + text + _event("ping")

    def chunk(self, piece: Piece) -> bytes:
        self.usage.note(0, piece.input_tokens, piece.output_tokens)
        text = self._told(piece)
        if not self._tools:
            return _TEXT + dump({"type": "text_delta", "text": text}) + b"}\n\n" if text else b""
        events = []
        if text:
            if self._kind != "text":
                events.append(self._begin({"type": "text", "text": ""}))
            events.append(self._delta({"type": "text_delta", "text": text}))
        for call in piece.tool_calls:
            if call.name:
                events.append(self._begin({**_use(call), "input": {}}))
            if call.arguments:
                delta = {"type": "input_json_delta", "partial_json": call.arguments}
                events.append(self._delta(delta))
        return b"".join(events)

    def _begin(self, block: dict[str, Any]) -> bytes:
        """Begin the next block; what was open ends."""
        ended = self._close()
        self._kind = block["type"]
        self._blocks += 1
        return ended + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> bytes:
        return _event("content_block_stop", index=self._blocks - 1) if self._kind else b""

    def closing(self) -> bytes:
        usage = {"output_tokens": self.usage.written}
        return (
            self._close()
            + _event("message_delta", delta=self._end, usage=usage)
            + _event("message_stop")
        )

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def _told(self, answer: Completion | Piece) -> str:
        """Return a text without the stop word at its end, and take note of why it ended."""
        if answer.finish_reason:
            self._end["stop_reason"] = _REASONS.get(answer.finish_reason, "end_turn")
        if answer.finish_reason == "stop":
            met = [word for word in self._stops if answer.text.endswith(word)]
            if met:
                word = max(met, key=len)
                self._end = {"stop_reason": "stop_sequence", "stop_sequence": word}
                return answer.text.removesuffix(word)
        return answer.text


def _use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def error_body(error: ApiError) -> bytes:
    kind = _TYPES.get(error.status, error.type)
    return dump({"type": "error", "error": {"type": kind, "message": error.message}})


def _event(kind: str, **content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dump({"type": kind, **content}))
