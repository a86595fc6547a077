"""APIs for generated text: asking a model for it, whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from llmserve.client import Completion, ModelInfo, Piece, read_calls, stream_calls
from llmserve.errors import LLMServeError
from llmserve.runtime.contract import (
    FILL_CONTEXT,
    INCLUDE_STOP,
    INT32,
    KEEP_LONGER,
    SUFFIX,
)
from llmserve_gateway.dialects import Dialect, Models
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.openai_requests import BUDGET
from llmserve_gateway.reply import Reply, RequestRecord
from llmserve_gateway.streams import each, flattened, merged
from llmserve_gateway.text_requests import ParsedRequest, Thinking
from llmserve_gateway.usage import Usage

if TYPE_CHECKING:
    from llmserve.plugin import ToolReader

_UNSAID = Thinking()
_COUNT_SECONDS = 0.5
"""How long an answer waits for the number of tokens that it has thought."""


class ResponseWriter(Protocol):
    """Writes the response to one request in the format of its API dialect."""

    usage: Usage

    def whole(self, answers: Sequence[Completion]) -> bytes: ...
    def opening(self, piece: Piece) -> bytes: ...
    def chunk(self, piece: Piece) -> bytes: ...
    def closing(self) -> bytes: ...
    def failure(self, error: ApiError) -> bytes: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class TextDialect(Dialect[ParsedRequest]):
    """The request and response formats of an API for text."""

    new_writer: Callable[[ParsedRequest, RequestRecord], ResponseWriter]
    operation: str = "chat"

    def failure_of(
        self, request: ParsedRequest, record: RequestRecord
    ) -> Callable[[ApiError], bytes]:
        return self.new_writer(request, record).failure

    async def begin(
        self,
        models: Models,
        info: ModelInfo,
        request: ParsedRequest,
        reply: Reply,
        timeout: float | None,
    ) -> tuple[Usage, Awaitable[None]]:
        request = await _with_thinking(models, info, request)
        await _check_fills_in(models, info, request)
        options = await models.tools.place(info, request.options, request.tools)
        new_reader = await models.tools.readers(info, request.tools, options)
        request = replace(
            request,
            options=options,
            has_parts=new_reader is not None,
            fingerprint=info.fingerprint,
        )
        if info.made_by_llmserve and "max_tokens" not in request.options:
            request.options[FILL_CONTEXT] = True
        if info.made_by_llmserve and (request.session or request.is_marked):
            request.options[KEEP_LONGER] = True
        if request.report_stop_word and INCLUDE_STOP.name in info.inputs:
            request.options[INCLUDE_STOP.name] = True
        if reply.inspected is not None:
            reply.inspected.asked = request
        writer = self.new_writer(request, reply.record)
        reply.error_event = writer.failure
        exchange = _Exchange(models, request, writer, reply, timeout, new_reader, self.keep)
        return writer.usage, exchange.stream() if request.stream else exchange.whole()

    async def keep(self, models: Models, request: ParsedRequest, writer: ResponseWriter) -> None:
        """Keep what has been answered, before its client has the end of it."""


@dataclass(frozen=True, eq=False)
class _Exchange:
    """A request to a model, with everything that is needed to respond to it."""

    models: Models
    request: ParsedRequest
    writer: ResponseWriter
    reply: Reply
    timeout: float | None
    new_reader: Callable[[], ToolReader] | None
    keep: Callable[[Models, ParsedRequest, ResponseWriter], Awaitable[None]]

    async def whole(self) -> None:
        request, record = self.request, self.reply.record
        generate = self.models.client().generate
        model, session = request.model, request.session
        ends = None if self.timeout is None else time.monotonic() + self.timeout

        async def ask(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[Completion]:
            # Of those that begin alike, the others have the time that the first one left.
            timeout = None if ends is None else max(0.0, ends - time.monotonic())
            tasks = [
                asyncio.ensure_future(
                    generate(model, prompt, timeout=timeout, session=session, **options)
                )
                for prompt, options in calls
            ]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

        calls = self._calls()
        # What all begin with is computed for the first, and kept for the others.
        before = 1 if request.begins_alike and len(calls) > 1 else 0
        answers = [*await ask(calls[:before]), *await ask(calls[before:])]
        if (sample := self.reply.sample) is not None:
            answers = [sample.hear(answer) for answer in answers]
        if new_reader := self.new_reader:
            parallel = request.parallel_calls
            answers = [read_calls(new_reader(), answer, parallel=parallel) for answer in answers]
            counting = (self._counted(answer) for answer in answers)
            answers = await asyncio.gather(*counting)
        if self.reply.answers is not None:
            self.reply.answers += answers
        body = self.writer.whole(answers)
        record.first_output = time.perf_counter()
        reasons = [answer.finish_reason or "stop" for answer in answers]
        record.finish_reasons, record.outcome = dict(enumerate(reasons)), reasons[-1]
        await self.keep(self.models, request, self.writer)
        await self.reply.send_body(body)

    async def stream(self) -> None:
        reply, writer, record = self.reply, self.writer, self.reply.record
        model = self.models.catalog.health(record.model)
        heard: list[Piece] | None = None if reply.answers is None else []
        async with aclosing(self._pieces()) as batches:
            async for pieces in batches:
                events = []
                if reply.sample is not None:
                    pieces = [reply.sample.hear(piece) for piece in pieces]
                if heard is not None:
                    heard += pieces
                for piece in pieces:
                    model.answers += 1
                    if record.first_output is None:
                        # Not earlier: until the model generates, an error can set the status.
                        record.first_output = time.perf_counter()
                        await reply.start_stream(writer.opening(piece))
                    if piece.finish_reason:
                        record.outcome = record.finish_reasons[piece.index] = piece.finish_reason
                    # Text that may become a call is held back; such a piece is not sent.
                    if (chunk := writer.chunk(piece)) and piece.is_news:
                        events.append(chunk)
                if events:
                    await reply.send_events(b"".join(events))
        if record.first_output is None:
            await reply.start_stream(writer.opening(Piece("")))
        closing = writer.closing()
        await self.keep(self.models, self.request, writer)
        await reply.end_stream(closing)
        if heard is not None and reply.answers is not None:
            for index in range(self.request.answer_count):
                own = (replace(piece, index=0) for piece in heard if piece.index == index)
                reply.answers.append(Completion.of(own))

    def _calls(self) -> list[tuple[str, dict[str, Any]]]:
        calls = self.request.model_calls()
        return calls if self.reply.sample is None else self.reply.sample.note(calls)

    def _pieces(self) -> AsyncGenerator[Sequence[Piece], None]:
        """Yield the pieces that have arrived by the same time, to be sent in one write."""
        request, stream = self.request, self.models.client().stream
        answers = [
            stream(request.model, prompt, timeout=self.timeout, session=request.session, **options)
            for prompt, options in self._calls()
        ]
        batches = merged(answers)
        if new_reader := self.new_reader:
            count, parallel = request.answer_count, request.parallel_calls
            calls = stream_calls(flattened(batches), new_reader, count, parallel=parallel)
            return each(calls)
        return batches

    async def _counted(self, answer: Completion) -> Completion:
        """Return a whole answer with the number of tokens that its thinking is."""
        if not answer.reasoning:
            return answer
        with suppress(LLMServeError, ApiError, asyncio.TimeoutError):
            asked = self.models.catalog.inspect_prompt(self.request.model, answer.reasoning)
            report = await asyncio.wait_for(asked, _COUNT_SECONDS)
            tokens = min(len(report["ids"]), answer.output_tokens or INT32)
            return replace(answer, reasoning_tokens=tokens)
        return answer


async def _with_thinking(models: Models, info: ModelInfo, request: ParsedRequest) -> ParsedRequest:
    """Return a request with what its model's template and runtime make of its thinking."""
    thinking, options = request.thinking, dict(request.options)
    asked = BUDGET if options.get(BUDGET) is not None else thinking.required_by
    if thinking == _UNSAID and not asked:
        return request
    if not await models.tools.thinks(info):
        if asked:
            what = f"{asked}: {info.name!r} does not think before it answers"
            raise bad_request(what, asked)
        return request
    if options.get(BUDGET) is not None and not _constrains(info):
        what = f"{BUDGET}: the engine of {info.name!r} cannot be made to end its thinking"
        raise bad_request(what, BUDGET)
    if arguments := thinking.arguments():
        given = options.get("chat_template_kwargs") or {}
        options["chat_template_kwargs"] = {**arguments, **given}
    if thinking.budget is not None and _constrains(info):
        options.setdefault(BUDGET, thinking.budget)
    return replace(request, options=options)


async def _check_fills_in(models: Models, info: ModelInfo, request: ParsedRequest) -> None:
    """Refuse a gap that a model cannot fill: one that knows of none would write as if at an end."""
    if SUFFIX not in request.options:
        return
    if not (info.made_by_llmserve and await models.catalog.fills_in(info.name)):
        name = request.sent.get(SUFFIX, SUFFIX)
        what = f"{name}: {info.name!r} fills in no gap, its tokenizer has no tokens for that"
        raise bad_request(what, name)


def _constrains(info: ModelInfo) -> bool:
    """Return whether a model's engine can be told which tokens come next."""
    return bool(info.made_by_llmserve) and "json_schema" in info.inputs
