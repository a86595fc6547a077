"""OpenAI's ``/v1/responses``, without a memory: every request brings the whole conversation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.client import Completion, Piece, ToolCall
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.fields import (
    Asked,
    Fields,
    given,
    read_form,
    read_messages,
    read_sampling,
    read_tools,
)
from llmserve_gateway.openai_answers import dump
from llmserve_gateway.usage import Usage

_CUT = ("length", "cancelled")
_WITHOUT_EFFECT = ("include", "truncation", "reasoning", "prompt", "stream_options")


def read_response_request(content: Mapping[str, Any]) -> Asked:
    """Read the body of ``/v1/responses``."""
    fields = Fields(content)
    messages = _conversation(fields.take("input"))
    instructions = fields.take("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise bad_request("instructions has to be a text", "instructions")
        messages.insert(0, {"role": "system", "content": instructions})
    fields.refuse(
        "this server keeps no responses: send the conversation in input",
        "previous_response_id", "conversation", "background",
    )  # fmt: skip
    options = read_sampling(fields)
    form = fields.mapping("text").get("format") or {"type": "text"}
    options |= read_form(fields, form, "text.format")
    metadata = fields.mapping("metadata")
    options["max_tokens"] = fields.number("max_output_tokens", int, 1)
    tools = read_tools(fields, messages)
    fields.refuse("this server does not tell them here", "top_logprobs")
    for name in _WITHOUT_EFFECT:
        fields.take(name)
    options = {**given(options), "messages": messages}
    return Asked(
        model=fields.text("model"),
        options=tools.options(options) if tools else options,
        stream=fields.boolean("stream"),
        tools=tools,
        repeated={"instructions": instructions, "metadata": metadata, "text": {"format": form}},
        unknown=fields.rest(),
    )


def _conversation(told: Any) -> list[dict[str, Any]]:
    if isinstance(told, str) and told:
        return [{"role": "user", "content": told}]
    if isinstance(told, list):
        told = [_message(item, f"input[{at}]") for at, item in enumerate(told)]
    return _joined(read_messages(told, "input"))


def _message(item: Any, where: str) -> Any:
    """Return an item as chats have it: calls and their results are items of their own."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        return item
    if kind == "function_call":
        call = {"id": item.get("call_id"), "function": item}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        output = {"content": item.get("output"), "tool_call_id": item.get("call_id")}
        return {"role": "tool", **output}
    what = f"{where} is of type {str(kind)[:40]!r}: only messages and functions can be read"
    raise bad_request(what, "input")


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put calls into the message that they stand behind: templates want them in one."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        before = joined[-1] if joined else {}
        if message.get("tool_calls") and before.get("role") == "assistant":
            calls = [*before.get("tool_calls", ()), *message["tool_calls"]]
            joined[-1] = {**before, "tool_calls": calls}
        else:
            joined.append(message)
    return joined


class ResponseAnswers:
    """Writes an answer as a response, whole or in OpenAI's events."""

    def __init__(self, asked: Asked, request_id: str) -> None:
        self.usage = Usage(1, 1)
        self._number = 0
        self._cut = False
        self._id = request_id
        self._tools = asked.tools
        self._output: list[dict[str, Any]] = []
        self._open = False
        options = asked.options
        self._response: dict[str, Any] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": asked.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "max_output_tokens": options.get("max_tokens"),
            "parallel_tool_calls": asked.parallel,
            "previous_response_id": None,
            "store": False,
            "temperature": options.get("temperature", 0),
            "tool_choice": _choice(asked),
            "tools": [{"type": "function", **f} for f in asked.tools.functions]
            if asked.tools
            else [],
            "top_p": options.get("top_p", 1),
            "usage": None,
            **asked.repeated,
        }

    def whole(self, answers: Sequence[Completion]) -> bytes:
        answer, calls = answers[0], answers[0].tool_calls
        self._note(answer)
        if answer.text or not calls:
            self._output.append(self._message(answer.text))
        self._output += map(self._call, calls)
        return dump(self._ended())

    def opening(self, piece: Piece) -> bytes:
        del piece
        start = self._event("response.created", response=self._response)
        start += self._event("response.in_progress", response=self._response)
        # Nobody knows yet whether an answer that may be a call has any text.
        return start if self._tools else start + self._begin(self._message(""))

    def chunk(self, piece: Piece) -> bytes:
        self._note(piece)
        events = b""
        if piece.text:
            if not self._open or self._output[-1]["type"] != "message":
                events += self._begin(self._message(""))
            self._output[-1]["content"][0]["text"] += piece.text
            events += self._told("output_text.delta", delta=piece.text, logprobs=[])
        for call in piece.tool_calls:
            if call.name:
                events += self._begin({**self._call(call), "arguments": ""})
            if call.arguments:
                self._output[-1]["arguments"] += call.arguments
                events += self._told("function_call_arguments.delta", delta=call.arguments)
        return events

    def closing(self) -> bytes:
        ended, response = self._end(), self._ended()
        return ended + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _begin(self, item: dict[str, Any]) -> bytes:
        """Begin the next item of the output; what was open ends."""
        events = self._end()
        self._output.append(item)
        self._open = True
        at, begun = len(self._output) - 1, {**item, "status": "in_progress"}
        if item["type"] != "message":
            return events + self._event("response.output_item.added", output_index=at, item=begun)
        begun["content"] = []
        events += self._event("response.output_item.added", output_index=at, item=begun)
        return events + self._told("content_part.added", part=_part(""))

    def _end(self) -> bytes:
        if not self._open:
            return b""
        self._open = False
        item = self._output[-1]
        item["status"] = self._status
        if item["type"] == "message":
            (part,) = item["content"]
            events = self._told("output_text.done", text=part["text"], logprobs=[])
            events += self._told("content_part.done", part=part)
        else:
            told = {"arguments": item["arguments"], "name": item["name"]}
            events = self._told("function_call_arguments.done", **told)
        at = len(self._output) - 1
        return events + self._event("response.output_item.done", output_index=at, item=item)

    def _told(self, kind: str, **content: Any) -> bytes:
        """Return an event about the last item."""
        item = self._output[-1]
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        if item["type"] == "message":
            place["content_index"] = 0
        return self._event(f"response.{kind}", **place, **content)

    def _note(self, answer: Completion | Piece) -> None:
        self.usage.note(0, answer.input_tokens, answer.output_tokens)
        self._cut = self._cut or answer.finish_reason in _CUT

    @property
    def _status(self) -> str:
        return "incomplete" if self._cut else "completed"

    def _item(self, kind: str, prefix: str) -> dict[str, Any]:
        # Several of a kind are told apart by their places.
        place = f"_{len(self._output)}" if self._output else ""
        return {"id": f"{prefix}_{self._id}{place}", "type": kind, "status": self._status}

    def _message(self, text: str) -> dict[str, Any]:
        return {**self._item("message", "msg"), "role": "assistant", "content": [_part(text)]}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        told = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        return {**self._item("function_call", "fc"), **told}

    def _ended(self) -> dict[str, Any]:
        read, written = self.usage.read, self.usage.written
        return {
            **self._response,
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._cut else None,
            "output": self._output,
            "usage": {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": read + written,
            },
        }

    def _event(self, kind: str, **content: Any) -> bytes:
        told = dump({"type": kind, "sequence_number": self._number, **content})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), told)


def _choice(asked: Asked) -> Any:
    if not asked.tools:
        return "none"
    named = asked.tools.named
    return {"type": "function", "name": named} if named else asked.tools.choice


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
