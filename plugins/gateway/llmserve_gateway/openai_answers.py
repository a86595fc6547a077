"""Answers of the OpenAI API to chats and completions, whole and in chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

from llmserve.client import Completion, Piece, ToolCall
from llmserve.client.results import Logprob
from llmserve_gateway.errors import ApiError
from llmserve_gateway.fields import Asked
from llmserve_gateway.usage import Usage

DONE = b"data: [DONE]\n\n"


class ChatAnswers:
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: Asked, request_id: str) -> None:
        self._asked = asked
        self._head = {
            "id": f"{self.prefix}-{request_id}",
            "object": self.kind,
            "created": int(time.time()),
            "model": asked.model,
        }
        # All of a chunk but its choice is the same every time.
        self._chunk_head = b"data: " + dump({**self._head, "object": self.chunk_kind})[:-1]
        self.usage = Usage(asked.count, asked.choices_each)

    def whole(self, answers: Sequence[Completion]) -> bytes:
        choices = []
        for index, answer in enumerate(answers):
            self._note(index, answer)
            choices.append(self._choice(index, answer))
        return dump({**self._head, "choices": choices, "usage": self.usage.as_json()})

    def opening(self, piece: Piece) -> bytes:
        """Return the chunks before the first text: whose turn it is."""
        del piece
        # Nobody knows yet whether an answer that may be a call has any text.
        delta = {"role": "assistant", "content": None if self._asked.tools else ""}
        return b"".join(
            self._chunk(
                dump({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            )
            for index in range(self._asked.count)
        )

    def chunk(self, piece: Piece) -> bytes:
        self._note(piece.index, piece)
        news = self._news(piece)
        logprobs = self._logprobs(piece.index, piece) if self._asked.logprobs else None
        # Most of what is sent are these: to write them piece by piece costs a third of dump().
        return self._chunk(
            b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b}'
            % (
                piece.index,
                news,
                b"null" if logprobs is None else dump(logprobs),
                b"null" if piece.finish_reason is None else dump(reason(piece.finish_reason)),
            )
        )

    def closing(self) -> bytes:
        if not self._asked.include_usage:
            return DONE
        usage = dump(self.usage.as_json())
        return b'%b,"choices":[],"usage":%b}\n\n%b' % (self._chunk_head, usage, DONE)

    def failure(self, error: ApiError) -> bytes:
        return error.event()

    def _note(self, index: int, answer: Completion | Piece) -> None:
        written = 0 if self._asked.silent else answer.output_tokens
        self.usage.note(index, answer.input_tokens, written)

    def _chunk(self, choice: bytes) -> bytes:
        usage = b""
        if self._asked.continuous_usage:
            usage = b',"usage":' + dump(self.usage.as_json())
        elif self._asked.include_usage:
            usage = b',"usage":null'
        return b'%b,"choices":[%b]%b}\n\n' % (self._chunk_head, choice, usage)

    def _choice(self, index: int, answer: Completion) -> dict[str, Any]:
        return {
            "index": index,
            **self._told(index, answer),
            "logprobs": self._logprobs(index, answer),
            "finish_reason": reason(answer.finish_reason or "stop"),
        }

    def _told(self, index: int, answer: Completion) -> dict[str, Any]:
        del index
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.tool_calls:
            calls = [_call(call) for call in answer.tool_calls]
            message |= {"content": answer.text or None, "tool_calls": calls}
        return {"message": message}

    def _news(self, piece: Piece) -> bytes:
        if piece.tool_calls:
            text = {"content": piece.text} if piece.text else {}
            told = [{"index": call.index, **_call(call)} for call in piece.tool_calls]
            return b'"delta":' + dump({**text, "tool_calls": told})
        if not piece.text:
            return b'"delta":{}'
        return b'"delta":{"content":%b}' % encode_basestring(piece.text).encode()

    def _logprobs(self, index: int, answer: Completion | Piece) -> dict[str, Any] | None:
        del index
        if not self._asked.logprobs or answer.logprobs is None:
            return None
        return {"content": [_token(one) for one in answer.logprobs], "refusal": None}


class CompletionAnswers(ChatAnswers):
    """Builds what is sent back for prompts that are gone on from."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, asked: Asked, request_id: str) -> None:
        super().__init__(asked, request_id)
        self._lengths = [0] * asked.count
        # Where the next token's text begins. A piece may hold back what its tokens say, and a
        # stop word takes some of it away.
        self._offsets: list[int | None] = [None] * asked.count

    def opening(self, piece: Piece) -> bytes:
        del piece
        return b""

    def _told(self, index: int, answer: Completion) -> dict[str, Any]:
        return {"text": self._echoed(index, answer)}

    def _news(self, piece: Piece) -> bytes:
        return b'"text":%b' % encode_basestring(self._echoed(piece.index, piece)).encode()

    def _echoed(self, index: int, answer: Completion | Piece) -> str:
        asked, text = self._asked, answer.text
        prompt = asked.prompts[index // asked.choices_each]
        if asked.echo and not self._lengths[index]:
            if isinstance(prompt, str):
                text = prompt if asked.silent else prompt + text
            elif asked.silent:
                # The model has told the prompt itself, and a token that nobody wants.
                end = sum(len(one.token) for one in answer.logprobs or ())
                text = text[: len(text) - end] if end else text
        elif asked.silent:
            text = ""
        self._lengths[index] += len(text)
        return text

    def _logprobs(self, index: int, answer: Completion | Piece) -> dict[str, Any] | None:
        if not self._asked.logprobs or answer.logprobs is None:
            return None
        read = json.loads(answer.extra.get("prompt_logprobs") or "[]")
        written = () if self._asked.silent else answer.logprobs
        tokens = [one["token"] for one in read] + [one.token for one in written]
        start = self._offsets[index]
        if start is None:
            start = 0 if read else self._prompt_length(index, tokens)
        offsets = []
        for token in tokens:
            offsets.append(start)
            start += len(token)
        self._offsets[index] = start
        return {
            "tokens": tokens,
            "token_logprobs": [one["logprob"] for one in read] + [one.logprob for one in written],
            "top_logprobs": [_top_read(one) for one in read]
            + [{o.token: o.logprob for o in one.top} for one in written],
            "text_offset": offsets,
        }

    def _prompt_length(self, index: int, tokens: Sequence[str]) -> int:
        """Return how much of the text stands before the first tokens that the model wrote."""
        prompt = self._asked.prompts[index // self._asked.choices_each]
        if not self._asked.echo:
            return 0
        if isinstance(prompt, str):
            return len(prompt)
        return max(0, self._lengths[index] - sum(map(len, tokens)))


def _top_read(one: Mapping[str, Any]) -> dict[str, float] | None:
    if one["logprob"] is None:
        return None  # Nothing stands before the first token.
    return {other["token"]: other["logprob"] for other in one.get("top", ())}


def _token(one: Logprob) -> dict[str, Any]:
    return {**_one(one), "top_logprobs": [_one(other) for other in one.top]}


def _one(one: Logprob) -> dict[str, Any]:
    return {"token": one.token, "logprob": one.logprob, "bytes": list(one.token.encode())}


def _call(call: ToolCall) -> dict[str, Any]:
    """Return a call, or the next part of one: the rest of it came before."""
    if not call.name:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def reason(finish_reason: str) -> str:
    """Return why an answer ended, in OpenAI's words."""
    # Nobody reads the answer to a request that was cancelled here; a deadline leaves it cut short.
    return "length" if finish_reason == "cancelled" else finish_reason


def dump(content: Any) -> bytes:
    # Half a character comes from a request that quotes one, and cannot be sent back.
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="replace")
