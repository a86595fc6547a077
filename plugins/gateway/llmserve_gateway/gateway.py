"""The way of a request: who asks, what for, is there room, and the answer as it comes."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llmserve.client import Completion, Piece
from llmserve.client.tools import read_calls
from llmserve.errors import LLMServeError, RequestCancelledError
from llmserve_gateway.addresses import check_collector
from llmserve_gateway.admission import Admission, Limits
from llmserve_gateway.bodies import Gone, Receive, read_json
from llmserve_gateway.catalog import Catalog
from llmserve_gateway.errors import ApiError, from_llmserve
from llmserve_gateway.fields import INCLUDE_STOP, Asked
from llmserve_gateway.keys import Key, KeyRing
from llmserve_gateway.metrics import Metrics
from llmserve_gateway.replicas import Replicas
from llmserve_gateway.reply import Reply, Send, Visit, request_id
from llmserve_gateway.tool_calls import Answer
from llmserve_gateway.tool_readers import NewReader, Readers
from llmserve_gateway.usage import Usage

if TYPE_CHECKING:
    from llmserve_gateway.tracing import Trace, Tracer

log = logging.getLogger("llmserve.gateway")

_MOST_NOTED = 1000
_LONGEST_NOTED = 60


@dataclass(frozen=True)
class Settings:
    """What a gateway is told; ``url`` is Triton's gRPC address.

    ``replicas`` are those of other Tritons that serve the same.
    """

    url: str
    limits: Limits = field(default_factory=Limits)
    request_timeout: float | None = 600.0
    keys: Path | None = None
    models: tuple[str, ...] = ()
    """The models to offer; all that are loaded where none is named."""
    triton_metrics: str | None = None
    """Triton's own metrics, to be had from the gateway as well."""
    open_metrics: bool = False
    """Whether metrics need no key."""
    supervisor: Path | None = None
    """The socket at which ``serve`` tells how its models are."""
    canary_interval: float = 10.0
    cors_origins: tuple[str, ...] = ()
    tool_parsers: tuple[str, ...] = ()
    """How calls of tools are read: a parser's name for all models, ``MODEL=NAME`` for one."""
    collector: str = ""
    """Where spans go, if anywhere."""
    replicas: tuple[str, ...] = ()
    replica_metrics: tuple[str, ...] = ()

    @property
    def all_metrics(self) -> tuple[str, ...]:
        """Where all Tritons have their metrics, as far as that is known."""
        return (self.triton_metrics, *self.replica_metrics) if self.triton_metrics else ()


class Answers(Protocol):
    """Writes the answer to one request as its dialect has it."""

    usage: Usage

    def whole(self, answers: Sequence[Completion]) -> bytes: ...
    def opening(self, piece: Piece) -> bytes: ...
    def chunk(self, piece: Piece) -> bytes: ...
    def closing(self) -> bytes: ...
    def failure(self, error: ApiError) -> bytes: ...


@dataclass(frozen=True)
class Dialect:
    """How one API asks and is answered."""

    read: Callable[[Mapping[str, Any]], Asked]
    answers: Callable[[Asked, str], Answers]
    error_body: Callable[[ApiError], bytes] = ApiError.json
    operation: str = "chat"
    """What OpenTelemetry calls it."""


@dataclass(frozen=True)
class _Request:
    """A request to a model, and where its answer goes."""

    asked: Asked
    answers: Answers
    reply: Reply
    timeout: float | None
    new_reader: NewReader | None


class Gateway:
    """Everything that one gateway holds."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.admission = Admission(settings.limits)
        self.metrics = Metrics()
        self.keys = KeyRing(settings.keys) if settings.keys else None
        self.catalog = Catalog(lambda: self.client, settings.models, settings.supervisor)
        self.readers = Readers(settings.tool_parsers, self.catalog)
        self._client: Replicas | None = None
        self._noted: set[str] = set()
        self.tracer: Tracer | None = None
        if settings.collector:
            check_collector(settings.collector)
            from llmserve_gateway.tracing import Tracer, send_to

            self.tracer = Tracer(*send_to(settings.collector))

    @property
    def client(self) -> Replicas:
        """The connections to the Tritons, opened on the loop that serves."""
        if self._client is None:
            self._client = Replicas((self.settings.url, *self.settings.replicas))
        return self._client

    async def disconnect(self) -> None:
        """Have the next request connect anew: a connection that was lost waits before it tries."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def close(self) -> None:
        await self.disconnect()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    def who(self, headers: Mapping[str, str]) -> Key | None:
        """Say whose request it is, None where nobody needs a key."""
        if self.keys is None:
            return None
        given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
        return self.keys.find(given)

    def check_model(self, key: Key | None, model: str) -> None:
        """Refuse a model that a key may not ask."""
        if key and key.models and model not in key.models:
            raise ApiError(403, f"this key may not ask {model[:200]!r}", param="model")

    def note_unknown(self, unknown: frozenset[str]) -> None:
        """Say once of each field that it is not known here."""
        new = {name for name in unknown if len(name) <= _LONGEST_NOTED} - self._noted
        if new and len(self._noted) < _MOST_NOTED:
            self._noted |= new
            names = ", ".join(repr(name) for name in sorted(new))
            log.warning("fields of requests that are ignored: %s", names)

    async def answer(self, scope: Any, receive: Receive, send: Send, dialect: Dialect) -> None:
        """Answer one request of an API, whatever becomes of it."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        visit = Visit(request_id(headers))
        trace = self.tracer.begin(headers, dialect.operation) if self.tracer else None
        reply = Reply(send, visit, dialect.error_body)
        try:
            await self._answer(headers, receive, reply, dialect, trace)
        except (Gone, asyncio.CancelledError, RequestCancelledError):
            visit.outcome, visit.status = "cancelled", 499
        except ApiError as error:
            await reply.fail(error)
        except LLMServeError as error:
            if visit.model:
                self.catalog.failed(visit.model, error)
            await reply.fail(from_llmserve(error))
        except Exception:
            log.exception("request %s", visit.id)
            await reply.fail(ApiError(500, "the gateway failed; its log says why"))
        finally:
            visit.ended = time.perf_counter()
            self.metrics.ended(visit)
            if trace is not None:
                trace.end(visit)
            print(visit.line(), file=sys.stderr, flush=True)  # noqa: T201

    async def _answer(
        self,
        headers: Mapping[str, str],
        receive: Receive,
        reply: Reply,
        dialect: Dialect,
        trace: Trace | None,
    ) -> None:
        key, visit = self.who(headers), reply.visit
        visit.key = key.name if key else ""
        asked = dialect.read(await read_json(receive, headers))
        if trace is not None:
            trace.asked(asked)
        self.note_unknown(asked.unknown)
        self.check_model(key, asked.model)
        timeout = self._timeout(headers)
        if key and self.keys:
            self.keys.spend(key, asked.tokens)
        # Whoever leaves frees the place: while an answer is made, somebody listens for that.
        place = self.admission.place(asked.tokens, asked.count, timeout)
        async with _cancelled_when_gone(receive), place:
            visit.admitted = time.perf_counter()
            if timeout is not None:
                timeout = max(0.001, timeout - (visit.admitted - visit.arrived))
            info = await self.catalog.info(asked.model)
            visit.model = info.name
            if info.made_by_llmserve:
                asked.options["x-request-id"] = visit.id
            if asked.tells_stop and INCLUDE_STOP in info.inputs:
                asked.options[INCLUDE_STOP] = True
            answers = dialect.answers(asked, visit.id)
            reply.error_event = answers.failure
            reader = await self.readers.of(info, asked.tools) if asked.tools else None
            request = _Request(asked, answers, reply, timeout, reader)
            with self.metrics.under_way(info.name, answers.usage):
                try:
                    await (self._stream(request) if asked.stream else self._whole(request))
                finally:
                    visit.read, visit.written = answers.usage.read, answers.usage.written
        self.catalog.answered(visit.model)

    async def _whole(self, request: _Request) -> None:
        asked, visit = request.asked, request.reply.visit
        ask = self.client.generate
        tasks = [
            asyncio.ensure_future(ask(asked.model, prompt, timeout=request.timeout, **options))
            for prompt, options in asked.calls()
        ]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if new := request.new_reader:
            found = [read_calls(new(), answer, parallel=asked.parallel) for answer in found]
        body = request.answers.whole(found)
        visit.first = time.perf_counter()
        visit.reasons = {at: answer.finish_reason or "stop" for at, answer in enumerate(found)}
        visit.outcome = visit.reasons[len(found) - 1]
        await request.reply.whole(body)

    async def _stream(self, request: _Request) -> None:
        reply, answers, visit = request.reply, request.answers, request.reply.visit
        health = self.catalog.health(visit.model)
        async with aclosing(self._read(request)) as pieces:
            async for piece in pieces:
                health.answered = time.monotonic()
                if visit.first is None:
                    # Not before: until the model has said something it can be an error's status.
                    visit.first = time.perf_counter()
                    await reply.begin(answers.opening(piece))
                if piece.finish_reason:
                    visit.outcome = visit.reasons[piece.index] = piece.finish_reason
                # What may become a call is held back, and says nothing yet.
                if (chunk := answers.chunk(piece)) and piece.is_news:
                    await reply.more(chunk)
        if visit.first is None:
            await reply.begin(answers.opening(Piece("")))
        await reply.end(answers.closing())

    def _read(self, request: _Request) -> AsyncGenerator[Piece, None]:
        """Give the pieces of all answers, with the calls in them."""
        asked, ask = request.asked, self.client.stream
        answers = [
            ask(asked.model, prompt, timeout=request.timeout, **options)
            for prompt, options in asked.calls()
        ]
        pieces = answers[0] if len(answers) == 1 else _as_they_come(answers)
        return _with_calls(pieces, request.new_reader, asked) if request.new_reader else pieces

    def _timeout(self, headers: Mapping[str, str]) -> float | None:
        given = headers.get("x-request-timeout")
        most = self.settings.request_timeout
        if given is None:
            return most
        with suppress(ValueError):
            if (seconds := float(given)) > 0:
                return seconds if most is None else min(seconds, most)
        raise ApiError(400, "x-request-timeout takes seconds above 0", param="x-request-timeout")


async def _as_they_come(
    answers: Sequence[AsyncGenerator[Piece, None]],
) -> AsyncGenerator[Piece, None]:
    """Give the pieces of several answers, whichever comes first."""
    arrived: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()

    async def pour(index: int, answer: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(answer) as pieces:
                async for piece in pieces:
                    arrived.put_nowait(replace(piece, index=index))
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.ensure_future(pour(at, answer)) for at, answer in enumerate(answers)]
    try:
        left = len(tasks)
        while left:
            news = await arrived.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                left -= 1
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _with_calls(
    pieces: AsyncGenerator[Piece, None], new: NewReader, asked: Asked
) -> AsyncGenerator[Piece, None]:
    """Give pieces with the calls that are read out of them."""
    answers = [Answer(new(), asked.parallel) for _ in range(asked.count)]
    async with aclosing(pieces):
        async for piece in pieces:
            yield answers[piece.index].take(piece)
    for index, answer in enumerate(answers):
        if not answer.ended:
            yield answer.take(Piece("", index, finish_reason="stop"))


@asynccontextmanager
async def _cancelled_when_gone(receive: Receive) -> AsyncIterator[None]:
    """Cancel what runs in the block when the client leaves."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101
    gone = False

    async def listen() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    listener = asyncio.ensure_future(listen())
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        if hasattr(task, "uncancel"):
            task.uncancel()
        raise Gone from None
    finally:
        listener.cancel()
