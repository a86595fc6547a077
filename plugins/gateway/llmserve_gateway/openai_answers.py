"""Chat and completion responses of the OpenAI API, complete and in chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

from starlette.responses import Response

from llmserve.client import Completion, Logprob, Piece, ToolCall
from llmserve_gateway.errors import ApiError
from llmserve_gateway.reply import RequestRecord
from llmserve_gateway.text_requests import ParsedRequest
from llmserve_gateway.usage import CACHED, Usage

DONE = b"data: [DONE]\n\n"


class ChatWriter:
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ParsedRequest, record: RequestRecord) -> None:
        self._request = request
        self._head = {
            "id": f"{self.prefix}-{record.id}",
            "object": self.kind,
            "created": int(time.time()),
            "model": request.called,
            **({"system_fingerprint": request.fingerprint} if request.fingerprint else {}),
        }
        # A chunk is always the same except for its choice.
        self._chunk_head = b"data: " + dump({**self._head, "object": self.chunk_kind})[:-1]
        self.usage = Usage(request.answer_count, request.answers_per_prompt)

    def whole(self, answers: Sequence[Completion]) -> bytes:
        choices = []
        for index, answer in enumerate(answers):
            self._update_usage(index, answer)
            choices.append(self._choice(index, answer))
        return dump({**self._head, "choices": choices, "usage": self.usage.as_json()})

    def opening(self, piece: Piece) -> bytes:
        """Return the chunks with the role, which precede the first text."""
        del piece
        # With tools, it is not known yet whether the answer has any text.
        delta = {"role": "assistant", "content": None if self._request.tools else ""}
        return b"".join(
            self._chunk(
                dump({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            )
            for index in range(self._request.answer_count)
        )

    def chunk(self, piece: Piece) -> bytes:
        self._update_usage(piece.index, piece)
        delta = self._delta(piece)
        logprobs = self._logprobs(piece.index, piece) if self._request.logprobs else None
        # Most output consists of these chunks; formatting them by hand costs a third of dump().
        return self._chunk(
            b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b}'
            % (
                piece.index,
                delta,
                b"null" if logprobs is None else dump(logprobs),
                b"null" if piece.finish_reason is None else dump(reason(piece.finish_reason)),
            )
        )

    def closing(self) -> bytes:
        if not self._request.include_usage:
            return DONE
        usage = dump(self.usage.as_json())
        return b'%b,"choices":[],"usage":%b}\n\n%b' % (self._chunk_head, usage, DONE)

    def failure(self, error: ApiError) -> bytes:
        return error.event()

    def _update_usage(self, index: int, answer: Completion | Piece) -> None:
        output_tokens = 0 if self._request.echo_only else answer.output_tokens
        cached = answer.extra.get(CACHED)
        thought = answer.reasoning_tokens
        self.usage.update(index, answer.input_tokens, output_tokens, cached, thought)

    def _chunk(self, choice: bytes) -> bytes:
        usage = b""
        if self._request.continuous_usage:
            usage = b',"usage":' + dump(self.usage.as_json())
        elif self._request.include_usage:
            usage = b',"usage":null'
        return b'%b,"choices":[%b]%b}\n\n' % (self._chunk_head, choice, usage)

    def _choice(self, index: int, answer: Completion) -> dict[str, Any]:
        return {
            "index": index,
            **self._content(index, answer),
            "logprobs": self._logprobs(index, answer),
            "finish_reason": reason(answer.finish_reason or "stop"),
        }

    def _content(self, index: int, answer: Completion) -> dict[str, Any]:
        del index
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message |= _reasoning(answer.reasoning)
        if answer.tool_calls:
            calls = [_call(call) for call in answer.tool_calls]
            message |= {"content": answer.text or None, "tool_calls": calls}
        return {"message": message}

    def _delta(self, piece: Piece) -> bytes:
        if piece.tool_calls or piece.reasoning:
            delta: dict[str, Any] = _reasoning(piece.reasoning) if piece.reasoning else {}
            if piece.text:
                delta["content"] = piece.text
            calls = [{"index": call.index, **_call(call)} for call in piece.tool_calls]
            return b'"delta":' + dump({**delta, "tool_calls": calls} if calls else delta)
        if not piece.text:
            return b'"delta":{}'
        return b'"delta":{"content":%b}' % dump_text(piece.text)

    def _logprobs(self, index: int, answer: Completion | Piece) -> dict[str, Any] | None:
        del index
        if not self._request.logprobs or answer.logprobs is None:
            return None
        return {"content": [token_json(token) for token in answer.logprobs], "refusal": None}


class CompletionWriter(ChatWriter):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: ParsedRequest, record: RequestRecord) -> None:
        super().__init__(request, record)
        self._lengths = [0] * request.answer_count
        # Where the next token's text begins, which the text sent so far does not show: a piece may
        # hold back the text of its tokens, and a stop word removes some.
        self._offsets: list[int | None] = [None] * request.answer_count

    def opening(self, piece: Piece) -> bytes:
        del piece
        return b""

    def _content(self, index: int, answer: Completion) -> dict[str, Any]:
        return {"text": self._echoed(index, answer)}

    def _delta(self, piece: Piece) -> bytes:
        return b'"text":%b' % dump_text(self._echoed(piece.index, piece))

    def _echoed(self, index: int, answer: Completion | Piece) -> str:
        request, text = self._request, answer.text
        prompt = request.prompts[index // request.answers_per_prompt]
        if request.echo and not self._lengths[index]:
            if isinstance(prompt, str):
                text = prompt if request.echo_only else prompt + text
            elif request.echo_only:
                # The model's text is the prompt, and one token that was not asked for.
                extra = sum(len(logprob.token) for logprob in answer.logprobs or ())
                text = text[: len(text) - extra] if extra else text
        elif request.echo_only:
            text = ""
        self._lengths[index] += len(text)
        return text

    def _logprobs(self, index: int, answer: Completion | Piece) -> dict[str, Any] | None:
        if not self._request.logprobs or answer.logprobs is None:
            return None
        prompt = json.loads(answer.extra.get("prompt_logprobs") or "[]")
        output = () if self._request.echo_only else answer.logprobs
        tokens = [entry["token"] for entry in prompt] + [entry.token for entry in output]
        start = self._offsets[index]
        if start is None:
            start = 0 if prompt else self._prompt_length(index, tokens)
        offsets = []
        for token in tokens:
            offsets.append(start)
            start += len(token)
        self._offsets[index] = start
        return {
            "tokens": tokens,
            "token_logprobs": [entry["logprob"] for entry in prompt]
            + [entry.logprob for entry in output],
            "top_logprobs": [_prompt_top_logprobs(entry) for entry in prompt]
            + [{top.token: top.logprob for top in entry.top} for entry in output],
            "text_offset": offsets,
        }

    def _prompt_length(self, index: int, tokens: Sequence[str]) -> int:
        """Return the length of the text before the first generated tokens."""
        prompt = self._request.prompts[index // self._request.answers_per_prompt]
        if not self._request.echo:
            return 0
        if isinstance(prompt, str):
            return len(prompt)
        return max(0, self._lengths[index] - sum(map(len, tokens)))


def _prompt_top_logprobs(entry: Mapping[str, Any]) -> dict[str, float] | None:
    if entry["logprob"] is None:
        return None  # The first token has no probability, because nothing precedes it.
    return {top["token"]: top["logprob"] for top in entry.get("top", ())}


def token_json(token: Logprob) -> dict[str, Any]:
    return {**_logprob_json(token), "top_logprobs": [_logprob_json(top) for top in token.top]}


def _logprob_json(entry: Logprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.token.encode())}


def _reasoning(text: str) -> dict[str, Any]:
    """Return what the model thought, by the name of DeepSeek's API and by that of OpenRouter's."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: ToolCall) -> dict[str, Any]:
    """Return a call, or the next part of the arguments of one that has been sent."""
    if not call.name:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def without_stop_word(answer: Completion | Piece, words: Sequence[str]) -> tuple[str, str | None]:
    """Return a text without the stop word at its end, and that word if the answer ended with it."""
    if answer.finish_reason == "stop":
        matches = [word for word in words if answer.text.endswith(word)]
        if matches:
            word = max(matches, key=len)
            return answer.text.removesuffix(word), word
    return answer.text, None


def reason(finish_reason: str) -> str:
    """Return OpenAI's name for a finish reason."""
    # A client that cancels does not read its answer; after a deadline the answer is truncated.
    return "length" if finish_reason == "cancelled" else finish_reason


def dump(content: Any) -> bytes:
    # A lone surrogate, from a request that contains one, cannot be encoded.
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="replace")


def response_event(kind: str, number: int, **content: Any) -> bytes:
    """Return an event of a response that is streamed."""
    data = dump({"type": kind, "sequence_number": number, **content})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def error_event(error: ApiError, number: int) -> bytes:
    said = {"code": error.code, "message": error.message, "param": error.param}
    return response_event("error", number, **said)


def json_response(content: Any, status: int = 200) -> Response:
    return Response(dump(content), status, media_type="application/json")


def dump_text(text: str) -> bytes:
    """Return what :func:`dump` does with a text, in a third of the time."""
    return encode_basestring(text).encode(errors="replace")
