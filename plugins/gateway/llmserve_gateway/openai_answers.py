"""Answers of the OpenAI API, whole and in chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from llmserve.client import Completion, Piece
from llmserve.client.results import Logprob
from llmserve_gateway.openai_requests import Asked

DONE = b"data: [DONE]\n\n"


class Answers:
    """Builds what is sent back for one request."""

    def __init__(self, asked: Asked, request_id: str) -> None:
        self._asked = asked
        prefix = "chatcmpl" if asked.is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{request_id}",
            "object": "chat.completion" if asked.is_chat else "text_completion",
            "created": int(time.time()),
            "model": asked.model,
        }
        kind = "chat.completion.chunk" if asked.is_chat else "text_completion"
        # All of a chunk but its choice is the same every time.
        self._chunk_head = b"data: " + _dump({**self._head, "object": kind})[:-1]
        self._offsets = [0] * len(asked.prompts)
        self._counts = Usage(len(asked.prompts), asked.choices_each)

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        return self._counts

    def whole(self, answers: Sequence[Completion]) -> bytes:
        """Return the body of an answer that is not streamed."""
        choices = []
        for index, answer in enumerate(answers):
            self._counts.note(index, answer.input_tokens, answer.output_tokens)
            choices.append(self._choice(index, answer))
        return _dump({**self._head, "choices": choices, "usage": self._counts.as_json()})

    def opening(self) -> bytes:
        """Return the chunks before the first text: in a chat, whose turn it is."""
        if not self._asked.is_chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            for index in range(len(self._asked.prompts))
        )

    def chunk(self, piece: Piece) -> bytes:
        """Return the event for a piece of an answer."""
        self._counts.note(piece.index, piece.input_tokens, piece.output_tokens)
        choice: dict[str, Any] = {"index": piece.index}
        if self._asked.is_chat:
            choice["delta"] = {"content": piece.text} if piece.text else {}
        else:
            choice["text"] = self._echoed(piece.index, piece.text)
        choice["logprobs"] = self._logprobs(piece.index, piece.logprobs)
        choice["finish_reason"] = _reason(piece.finish_reason)
        return self._chunk(choice)

    def closing(self) -> bytes:
        """Return what ends a stream."""
        if not self._asked.include_usage:
            return DONE
        usage = _dump(self._counts.as_json())
        return b'%b,"choices":[],"usage":%b}\n\n%b' % (self._chunk_head, usage, DONE)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        usage = b""
        if self._asked.continuous_usage:
            usage = b',"usage":' + _dump(self._counts.as_json())
        elif self._asked.include_usage:
            usage = b',"usage":null'
        return b'%b,"choices":[%b]%b}\n\n' % (self._chunk_head, _dump(choice), usage)

    def _choice(self, index: int, answer: Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if self._asked.is_chat:
            choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
        else:
            choice["text"] = self._echoed(index, answer.text)
        choice["logprobs"] = self._logprobs(index, answer.logprobs)
        choice["finish_reason"] = _reason(answer.finish_reason or "stop")
        return choice

    def _echoed(self, index: int, text: str) -> str:
        if self._asked.echo and not self._offsets[index]:
            text = self._asked.prompts[index] + text
        self._offsets[index] += len(text)
        return text

    def _logprobs(self, index: int, logprobs: Sequence[Logprob] | None) -> dict[str, Any] | None:
        if not self._asked.logprobs or logprobs is None:
            return None
        if self._asked.is_chat:
            return {"content": [_token(one) for one in logprobs], "refusal": None}
        tokens = [one.token for one in logprobs]
        start = max(0, self._offsets[index] - sum(map(len, tokens)))
        offsets = []
        for token in tokens:
            offsets.append(start)
            start += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [{o.token: o.logprob for o in one.top} for one in logprobs],
            "text_offset": offsets,
        }


class Usage:
    """Counts tokens of a request with several prompts and several answers to each."""

    def __init__(self, answers: int, each: int) -> None:
        self._read = [0] * answers
        self._written = [0] * answers
        self._each = each

    def note(self, index: int, read: int | None, written: int | None) -> None:
        """Take the counts of one answer so far."""
        self._read[index] = read or self._read[index]
        self._written[index] = written or self._written[index]

    @property
    def read(self) -> int:
        """The tokens of all prompts; several answers to one prompt read it once."""
        return sum(self._read[:: self._each])

    @property
    def written(self) -> int:
        """The tokens of all answers."""
        return sum(self._written)

    def as_json(self) -> dict[str, int]:
        """Return them as the API has them."""
        read, written = self.read, self.written
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        }


def _token(one: Logprob) -> dict[str, Any]:
    return {**_one(one), "top_logprobs": [_one(other) for other in one.top]}


def _one(one: Logprob) -> dict[str, Any]:
    return {"token": one.token, "logprob": one.logprob, "bytes": list(one.token.encode())}


def _reason(reason: str | None) -> str | None:
    # Nobody reads the answer to a request that was cancelled here; a deadline leaves it cut short.
    return "length" if reason == "cancelled" else reason


def _dump(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
