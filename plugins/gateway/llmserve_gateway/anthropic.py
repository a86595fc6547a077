"""Anthropic's Messages API: ``/v1/messages`` and its ``count_tokens``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.client import Completion, Piece
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

_REASONS = {"stop": "end_turn", "length": "max_tokens", "cancelled": "max_tokens"}
_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}
_TEXT = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":'


def read_messages_request(content: Mapping[str, Any]) -> Asked:
    """Read the body of ``/v1/messages``."""
    return _read(content, counts=False)


def read_count_request(content: Mapping[str, Any]) -> Asked:
    """Read the body of ``/v1/messages/count_tokens``, which needs no ``max_tokens``."""
    return _read(content, counts=True)


def _read(content: Mapping[str, Any], *, counts: bool) -> Asked:
    fields = Fields(content)
    messages = read_messages(fields.take("messages"))
    if any(message["role"] not in ("user", "assistant") for message in messages):
        raise bad_request("messages are the user's and the assistant's: see system", "messages")
    if (system := fields.take("system")) is not None:
        messages.insert(0, {"role": "system", "content": read_text(system, "system")})
    options = read_sampling(fields, "stop_sequences", warmest=1)
    options["max_tokens"] = fields.number("max_tokens", int, 1)
    if options["max_tokens"] is None and not counts:
        raise bad_request("max_tokens has to be a whole number from 1", "max_tokens")
    if fields.mapping("thinking").get("type") not in (None, "disabled"):
        raise bad_request("thinking: this server's models have none apart from their answer",
                          "thinking")  # fmt: skip
    fields.refuse_tools()
    fields.refuse("this server cannot do that", "mcp_servers", "container")
    return Asked(
        model=fields.text("model"),
        options={**given(options), "messages": messages},
        stream=fields.boolean("stream"),
        tells_stop="stop_words" in given(options),
        unknown=fields.rest(),
    )


class MessageAnswers:
    """Writes an answer as a message, whole or in Anthropic's events."""

    def __init__(self, asked: Asked, request_id: str) -> None:
        self.usage = Usage(1, 1)
        self._stops = asked.options.get("stop_words") or [] if asked.tells_stop else []
        self._end: dict[str, str | None] = {"stop_reason": "end_turn", "stop_sequence": None}
        self._message: dict[str, Any] = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": asked.model,
            "content": [],
            **dict.fromkeys(self._end),
        }

    def whole(self, answers: Sequence[Completion]) -> bytes:
        answer = answers[0]
        self.usage.note(0, answer.input_tokens, answer.output_tokens)
        text = self._told(answer)
        message = {
            **self._message,
            **self._end,
            "content": [{"type": "text", "text": text}],
            "usage": {"input_tokens": self.usage.read, "output_tokens": self.usage.written},
        }
        return dump(message)

    def opening(self, piece: Piece) -> bytes:
        usage = {"input_tokens": piece.input_tokens or 0, "output_tokens": 0}
        return (
            _event("message_start", message={**self._message, "usage": usage})
            + _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
            + _event("ping")
        )

    def chunk(self, piece: Piece) -> bytes:
        self.usage.note(0, piece.input_tokens, piece.output_tokens)
        text = self._told(piece)
        if not text:
            return b""
        return _TEXT + dump({"type": "text_delta", "text": text}) + b"}\n\n"

    def closing(self) -> bytes:
        usage = {"output_tokens": self.usage.written}
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=self._end, usage=usage)
            + _event("message_stop")
        )

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


def error_body(error: ApiError) -> bytes:
    kind = _TYPES.get(error.status, error.type)
    return dump({"type": "error", "error": {"type": kind, "message": error.message}})


def error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: " + error_body(error) + b"\n\n"


def _event(kind: str, **content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dump({"type": kind, **content}))
