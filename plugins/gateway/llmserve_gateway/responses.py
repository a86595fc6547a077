"""OpenAI's ``/v1/responses``, without a memory: every request brings the whole conversation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.client import Completion, Piece
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.fields import Asked, Fields, given, read_form, read_messages, read_sampling
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
    options |= read_form(fields, fields.mapping("text").get("format"))
    options["max_tokens"] = fields.number("max_output_tokens", int, 1)
    fields.refuse_tools()
    fields.refuse("this server does not tell them here", "top_logprobs")
    for name in _WITHOUT_EFFECT:
        fields.take(name)
    return Asked(
        model=fields.text("model"),
        options={**given(options), "messages": messages},
        stream=fields.boolean("stream"),
        unknown=fields.rest(),
    )


def _conversation(told: Any) -> list[dict[str, Any]]:
    if isinstance(told, str) and told:
        return [{"role": "user", "content": told}]
    if isinstance(told, list):
        for at, item in enumerate(told):
            kind = item.get("type", "message") if isinstance(item, dict) else None
            if kind != "message":
                what = f"input[{at}] is of type {str(kind)[:40]!r}: only messages can be read"
                raise bad_request(what, "input")
    return read_messages(told, "input")


class ResponseAnswers:
    """Writes an answer as a response, whole or in OpenAI's events."""

    def __init__(self, asked: Asked, request_id: str) -> None:
        self.usage = Usage(1, 1)
        self._number = 0
        self._text: list[str] = []
        self._cut = False
        self._item = f"msg_{request_id}"
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
            "instructions": None,
            "max_output_tokens": options.get("max_tokens"),
            "metadata": {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": options.get("temperature", 0),
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": options.get("top_p", 1),
            "usage": None,
        }
        self._place = {"item_id": self._item, "output_index": 0, "content_index": 0}

    def whole(self, answers: Sequence[Completion]) -> bytes:
        answer = answers[0]
        self._note(answer)
        return dump(self._ended())

    def opening(self, piece: Piece) -> bytes:
        del piece
        item = {**self._message(), "status": "in_progress", "content": []}
        return (
            self._event("response.created", response=self._response)
            + self._event("response.in_progress", response=self._response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._place, part=_part(""))
        )

    def chunk(self, piece: Piece) -> bytes:
        self._note(piece)
        if not piece.text:
            return b""
        return self._event(
            "response.output_text.delta", **self._place, delta=piece.text, logprobs=[]
        )

    def closing(self) -> bytes:
        text, response = "".join(self._text), self._ended()
        end = f"response.{response['status']}"
        return (
            self._event("response.output_text.done", **self._place, text=text, logprobs=[])
            + self._event("response.content_part.done", **self._place, part=_part(text))
            + self._event("response.output_item.done", output_index=0, item=self._message())
            + self._event(end, response=response)
        )

    def _note(self, answer: Completion | Piece) -> None:
        self.usage.note(0, answer.input_tokens, answer.output_tokens)
        self._text.append(answer.text)
        self._cut = self._cut or answer.finish_reason in _CUT

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": "incomplete" if self._cut else "completed",
            "content": [_part("".join(self._text))],
        }

    def _ended(self) -> dict[str, Any]:
        read, written = self.usage.read, self.usage.written
        return {
            **self._response,
            "status": "incomplete" if self._cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if self._cut else None,
            "output": [self._message()],
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


def error_event(error: ApiError) -> bytes:
    told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return b"event: error\ndata: " + dump(told) + b"\n\n"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
