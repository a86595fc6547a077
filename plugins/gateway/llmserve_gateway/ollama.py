"""Ollama's API, as its version 0.33 has it: its answers, whole and as lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from llmserve.client import Completion, Computed, Logprob, ModelInfo, Piece, ToolCall
from llmserve_gateway.dialects import Models
from llmserve_gateway.errors import ApiError
from llmserve_gateway.keys import Key
from llmserve_gateway.openai_answers import dump, token_json
from llmserve_gateway.reply import LINES, Reply, RequestRecord, StreamFormat
from llmserve_gateway.text_dialect import TextDialect
from llmserve_gateway.text_requests import ParsedRequest, Thinking
from llmserve_gateway.usage import CACHED, Usage
from llmserve_gateway.value_dialect import ValueDialect
from llmserve_gateway.value_requests import ValueRequest
from llmserve_gateway.values import EmbeddingsWriter, input_tokens

VERSION = "0.33.0"
"""The version of Ollama whose API this is: its clients ask for it, to see what they may send."""
_REASONS = {"length": "length", "cancelled": "length"}
# Python's clients take these for ends of lines as well, in which no text may put them.
_LINE_ENDS = {mark.encode(): json.dumps(mark)[1:-1].encode() for mark in "\x85\u2028\u2029"}


def error_body(error: ApiError) -> bytes:
    return dump({"error": error.message})


def line(content: Any) -> bytes:
    """Return an object as a line, whatever texts it has."""
    data = dump(content)
    if not data.isascii():
        for mark, escaped in _LINE_ENDS.items():
            data = data.replace(mark, escaped)
    return data + b"\n"


def moment(seconds: float | None = None) -> str:
    """Return a time, now if it is not given, as this API writes it."""
    zone = timezone.utc
    when = datetime.now(zone) if seconds is None else datetime.fromtimestamp(seconds, zone)
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class TextWriter:
    """Writes an answer of ``/api/generate``."""

    def __init__(self, request: ParsedRequest, record: RequestRecord) -> None:
        self.usage = Usage(1, 1)
        self._request = request
        self._record = record
        self._reason = "stop"
        self._calls: list[ToolCall] = []
        """Those that have been sent, and one of which only the beginning is known."""
        self._is_open = False

    def whole(self, answers: Sequence[Completion]) -> bytes:
        answer = answers[0]
        self._count(answer)
        calls = [_call(index, call) for index, call in enumerate(answer.tool_calls)]
        said = self._said(answer.text, answer.reasoning, calls)
        return dump({**self._head(), **said, **self._end(), **self._logprobs(answer.logprobs)})

    def loaded(self, reason: str = "load") -> bytes:
        """Return the answer to a request that only wants its model loaded, or unloaded."""
        end = {"done": True, "done_reason": reason}
        return dump({**self._head(), **self._said("", "", ()), **end})

    def opening(self, piece: Piece) -> bytes:
        del piece
        return b""

    def chunk(self, piece: Piece) -> bytes:
        self._count(piece)
        text, calls = piece.text, []
        for part in piece.tool_calls:
            if part.name:
                calls += self._closed_call()
                self._calls.append(part)
                self._is_open = True
            else:
                begun = self._calls[-1]
                self._calls[-1] = replace(begun, arguments=begun.arguments + part.arguments)
        if piece.finish_reason:
            text += self._cut_call()
            calls += self._closed_call()
        logprobs = self._logprobs(piece.logprobs)
        if not (text or piece.reasoning or calls or logprobs):
            return b""
        said = self._said(text, piece.reasoning, calls)
        return line({**self._head(), **said, "done": False, **logprobs})

    def closing(self) -> bytes:
        return line({**self._head(), **self._said("", "", ()), **self._end()})

    def failure(self, error: ApiError) -> bytes:
        return line({"error": error.message})

    def _said(self, text: str, thoughts: str, calls: Sequence[Any]) -> dict[str, Any]:
        thinking = {"thinking": thoughts} if thoughts else {}
        called = {"tool_calls": [*calls]} if calls else {}
        return {"response": text, **thinking, **called}

    def _head(self) -> dict[str, Any]:
        return {"model": self._request.called, "created_at": moment()}

    def _end(self) -> dict[str, Any]:
        """Return why an answer has ended, and its tokens and times, in nanoseconds."""
        record, now = self._record, time.perf_counter()
        asked = record.admitted or record.arrived
        read = {}
        if record.first_output is not None:
            # Of an answer that arrives in one piece it is not known.
            read = {"prompt_eval_duration": _nanoseconds(record.first_output - asked)}
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": _nanoseconds(now - record.arrived),
            "load_duration": _nanoseconds(asked - record.arrived),
            "prompt_eval_count": self.usage.input_tokens,
            **read,
            "eval_count": self.usage.output_tokens,
            "eval_duration": _nanoseconds(now - (record.first_output or asked)),
        }

    def _logprobs(self, logprobs: Sequence[Logprob] | None) -> dict[str, Any]:
        if not self._request.logprobs or not logprobs:
            return {}
        return {"logprobs": [token_json(token) for token in logprobs]}

    def _count(self, answer: Completion | Piece) -> None:
        cached = answer.extra.get(CACHED)
        self.usage.update(0, answer.input_tokens, answer.output_tokens, cached)
        if answer.finish_reason:
            self._reason = _REASONS.get(answer.finish_reason, "stop")

    def _closed_call(self) -> list[dict[str, Any]]:
        """Return the call that is whole now: this API sends none in parts."""
        if not self._is_open:
            return []
        self._is_open = False
        return [_call(len(self._calls) - 1, self._calls[-1])]

    def _cut_call(self) -> str:
        """Return a call that is not whole when the answer ends, as text."""
        if not self._is_open:
            return ""
        call = self._calls[-1]
        try:
            json.loads(call.arguments)
        except ValueError:
            self._is_open = False
            return f"{call.name}{call.arguments}"
        return ""


class ChatWriter(TextWriter):
    """Writes an answer of ``/api/chat``."""

    def _said(self, text: str, thoughts: str, calls: Sequence[Any]) -> dict[str, Any]:
        said = super()._said(text, thoughts, calls)
        return {"message": {"role": "assistant", "content": said.pop("response"), **said}}


def _call(index: int, call: ToolCall) -> dict[str, Any]:
    function = {"index": index, "name": call.name, "arguments": json.loads(call.arguments)}
    return {"id": call.id, "function": function}


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))


@dataclass(frozen=True, eq=False, kw_only=True)
class TurnDialect(TextDialect):
    """Chats and texts; a request without either has its model loaded."""

    new_writer: Callable[[ParsedRequest, RequestRecord], TextWriter]
    error_body: Callable[[ApiError], bytes] = error_body
    streams_as: StreamFormat = LINES
    is_of_one_prompt: bool = False
    """Whether a model without a chat template reads the prompt as it is."""

    def unloaded(self, request: ParsedRequest, record: RequestRecord) -> bytes:
        return self.new_writer(request, record).loaded("unload")

    async def begin(
        self,
        models: Models,
        info: ModelInfo,
        request: ParsedRequest,
        reply: Reply,
        timeout: float | None,
    ) -> tuple[Usage, Awaitable[None]]:
        if request.only_loads:
            writer = self.new_writer(request, reply.record)
            return writer.usage, _answer_loaded(writer, reply)
        is_shown = self.is_of_one_prompt and "messages" in request.options
        if is_shown and await models.catalog.chat_template(info.name) is None:
            request = _without_template(request)
        return await super().begin(models, info, request, reply, timeout)


async def _answer_loaded(writer: TextWriter, reply: Reply) -> None:
    reply.record.outcome = "stop"
    await reply.send_body(writer.loaded())


def _without_template(request: ParsedRequest) -> ParsedRequest:
    """Return a request whose messages are the prompt, one after the other."""
    messages = request.options["messages"]
    if not all(isinstance(message["content"], str) for message in messages):
        return request  # The model says that it sees no images.
    names = ("messages", "chat_template_kwargs")
    options = {name: value for name, value in request.options.items() if name not in names}
    prompt = "\n\n".join(message["content"] for message in messages)
    return replace(request, options=options, prompts=[prompt], thinking=Thinking())


@dataclass(frozen=True, eq=False, kw_only=True)
class VectorDialect(ValueDialect):
    """Embeddings, of texts that are cut unless a request says otherwise."""

    error_body: Callable[[ApiError], bytes] = error_body
    operation: str = "embeddings"

    async def settled(self, models: Models, key: Key | None, request: ValueRequest) -> ValueRequest:
        request = await super().settled(models, key, request)
        return replace(request, may_cut=request.cut is None)


class VectorsWriter(EmbeddingsWriter):
    """Writes an answer of ``/api/embed``."""

    async def whole(self, computed: Computed) -> bytes:
        record, now = self._record, time.perf_counter()
        more = {
            "total_duration": _nanoseconds(now - record.arrived),
            "load_duration": _nanoseconds((record.admitted or record.arrived) - record.arrived),
            "prompt_eval_count": input_tokens(computed),
        }
        head, vectors = dump({"model": self._request.called}), await self._vectors(computed)
        return b'%b,"embeddings":[%b],%b' % (head[:-1], b",".join(vectors), dump(more)[1:])


class VectorWriter(EmbeddingsWriter):
    """Writes an answer of ``/api/embeddings``, which is older."""

    async def whole(self, computed: Computed) -> bytes:
        return b'{"embedding":%b}' % (await self._vectors(computed))[0]
