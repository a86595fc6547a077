"""The gateway: HTTP requests of the OpenAI API in, requests to Triton out."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from llmserve.client import AsyncClient, connect_async
from llmserve.client.model import ModelInfo
from llmserve.errors import LLMServeError, RequestCancelledError
from llmserve_gateway.admission import Admission, Limits
from llmserve_gateway.bodies import Gone, Receive, read_json
from llmserve_gateway.errors import ApiError, from_llmserve
from llmserve_gateway.keys import Key, KeyRing
from llmserve_gateway.metrics import Metrics
from llmserve_gateway.openai_answers import Answers
from llmserve_gateway.openai_requests import Asked, read_chat, read_completion

Send = Callable[[Any], Awaitable[None]]
Reader = Callable[[Mapping[str, Any]], Asked]

PAGE = Path(__file__).with_name("page")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# A token is seldom shorter; what is counted roughly here is counted exactly by the model.
_BYTES_A_TOKEN = 3
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_JSON = (b"content-type", b"application/json")

log = logging.getLogger("llmserve.gateway")


@dataclass(frozen=True)
class Settings:
    """What a gateway is told; ``url`` is Triton's gRPC address."""

    url: str
    limits: Limits = field(default_factory=Limits)
    request_timeout: float | None = 600.0
    keys: Path | None = None
    models: tuple[str, ...] = ()
    """The models to offer, where Triton's own list is not for everybody to read."""


@dataclass
class _Visit:
    """One request on its way, as the log tells of it."""

    id: str
    arrived: float
    key: str = ""
    model: str = ""
    outcome: str = "refused"
    status: int = 0
    first: float | None = None
    admitted: float | None = None
    read: int = 0
    written: int = 0

    def line(self) -> str:
        """Return the line of the log: figures and names, never the text."""

        def since(moment: float | None) -> float | None:
            return None if moment is None else round((moment - self.arrived) * 1000, 1)

        return json.dumps(
            {
                "id": self.id,
                "key": self.key,
                "model": self.model,
                "status": self.status,
                "outcome": self.outcome,
                "input_tokens": self.read,
                "output_tokens": self.written,
                "queue_ms": since(self.admitted),
                "first_ms": since(self.first),
                "total_ms": since(time.perf_counter()),
            }
        )


class Gateway:
    """Everything that one gateway holds; :func:`make_app` makes an application of it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.admission = Admission(settings.limits)
        self.metrics = Metrics()
        self.keys = KeyRing(settings.keys) if settings.keys else None
        self._client: AsyncClient | None = None
        self._noted: set[str] = set()

    @property
    def client(self) -> AsyncClient:
        """The connection to Triton, opened on the loop that serves."""
        if self._client is None:
            self._client = connect_async(self.settings.url)
        return self._client

    async def close(self) -> None:
        """Let go of the connection."""
        if self._client is not None:
            await self._client.close()

    def who(self, headers: Mapping[str, str]) -> Key | None:
        """Say whose request it is, None where nobody needs a key."""
        return self.keys.find(headers.get("authorization", "")) if self.keys else None

    async def models(self, key: Key | None = None) -> list[ModelInfo]:
        """Return what can be asked: text in, text out, and no part of something else."""
        found = [await self.client.model(name) for name in await self.ready_models()]
        parts = {part for info in found for part in info.parts}
        return [
            info
            for info in found
            if {"text_input"} <= info.inputs.keys()
            and {"text_output"} <= info.outputs.keys()
            and info.name not in parts
            and (key is None or not key.models or info.name in key.models)
        ]

    async def ready_models(self) -> list[str]:
        """Return the names of what is loaded, parts of other models among them."""
        named = self.settings.models
        if not named:
            return await self.client.models()
        return [name for name in named if await self.client.model_ready(name)]

    def note_unknown(self, asked: Asked) -> None:
        """Say once of each field that it is not known here."""
        if new := asked.unknown - self._noted:
            self._noted |= new
            log.warning("fields of requests that are ignored: %s", ", ".join(sorted(new)))

    # Answering

    async def answer(self, scope: Any, receive: Receive, send: Send, read: Reader) -> None:
        """Answer one request of the API, whatever becomes of it."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        visit = _Visit(request_id, time.perf_counter())
        reply = _Reply(send, visit)
        try:
            await self._answer(headers, receive, reply, read, visit)
        except (Gone, asyncio.CancelledError, RequestCancelledError):
            visit.outcome, visit.status = "cancelled", 499
        except ApiError as error:
            await reply.fail(error)
        except LLMServeError as error:
            await reply.fail(from_llmserve(error))
        except Exception:
            log.exception("request %s", visit.id)
            await reply.fail(ApiError(500, "the gateway failed; its log says why"))
        finally:
            self.metrics.finished.labels(visit.model or "-", visit.outcome).inc()
            print(visit.line(), file=sys.stderr, flush=True)  # noqa: T201

    async def _answer(
        self,
        headers: Mapping[str, str],
        receive: Receive,
        reply: _Reply,
        read: Reader,
        visit: _Visit,
    ) -> None:
        key = self.who(headers)
        visit.key = key.name if key else ""
        asked = read(await read_json(receive, headers.get("content-length")))
        self.note_unknown(asked)
        if key and key.models and asked.model not in key.models:
            raise ApiError(403, f"this key may not ask {asked.model!r}", param="model")
        tokens = asked.bytes // _BYTES_A_TOKEN + 1
        if key and self.keys:
            self.keys.spend(key, tokens)
        timeout = self._timeout(headers)
        # Whoever leaves frees the place: while an answer is made, somebody listens for that.
        async with _cancelled_when_gone(receive), self.admission.place(tokens):
            visit.admitted = time.perf_counter()
            info = await self.client.model(asked.model)
            visit.model = info.name
            running = self.metrics.running.labels(info.name)
            running.inc()
            answers = Answers(asked, visit.id)
            try:
                if asked.stream:
                    await self._stream(asked, answers, reply, visit, timeout)
                else:
                    await self._whole(asked, answers, reply, visit, timeout)
            finally:
                running.dec()
                self._count(answers, visit)

    async def _whole(
        self, asked: Asked, answers: Answers, reply: _Reply, visit: _Visit, timeout: float | None
    ) -> None:
        found = await self.client.generate(
            asked.model, asked.prompts, timeout=timeout, **asked.options
        )
        body = answers.whole(found)
        visit.first = time.perf_counter()
        visit.outcome = found[-1].finish_reason or "stop"
        await reply.whole(body)

    async def _stream(
        self, asked: Asked, answers: Answers, reply: _Reply, visit: _Visit, timeout: float | None
    ) -> None:
        pieces = self.client.stream(asked.model, asked.prompts, timeout=timeout, **asked.options)
        async with aclosing(pieces):
            async for piece in pieces:
                if visit.first is None:
                    # Not before: until the model has said something it can be an error's status.
                    visit.first = time.perf_counter()
                    self.metrics.first_token.labels(visit.model).observe(
                        visit.first - visit.arrived
                    )
                    await reply.begin(answers.opening())
                visit.outcome = piece.finish_reason or visit.outcome
                await reply.more(answers.chunk(piece))
        if visit.first is None:
            await reply.begin(answers.opening())
        await reply.end(answers.closing())

    def _count(self, answers: Answers, visit: _Visit) -> None:
        usage = answers.usage
        visit.read, visit.written = usage.read, usage.written
        self.metrics.prompt_tokens.labels(visit.model).inc(usage.read)
        self.metrics.generated_tokens.labels(visit.model).inc(usage.written)
        self.metrics.latency.labels(visit.model).observe(time.perf_counter() - visit.arrived)

    def _timeout(self, headers: Mapping[str, str]) -> float | None:
        given = headers.get("x-request-timeout")
        most = self.settings.request_timeout
        if given is None:
            return most
        with suppress(ValueError):
            if (seconds := float(given)) > 0:
                return seconds if most is None else min(seconds, most)
        raise ApiError(400, "x-request-timeout takes seconds above 0", param="x-request-timeout")


class _Reply:
    """Sends an answer; an error in the middle of a stream becomes its last event."""

    def __init__(self, send: Send, visit: _Visit) -> None:
        self._send = send
        self._visit = visit
        self._streams = False

    async def whole(self, body: bytes, status: int = 200, headers: Any = ()) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [_JSON, length, *headers])
        await self._send({"type": "http.response.body", "body": body})

    async def begin(self, events: bytes) -> None:
        # Proxies must not collect what comes piece by piece.
        await self._start(
            200, [_EVENTS, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        )
        self._streams = True
        if events:
            await self.more(events)

    async def more(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events})

    async def fail(self, error: ApiError) -> None:
        self._visit.outcome = "refused" if error.status < 500 else "failed"
        with suppress(OSError):
            if self._streams:
                self._visit.status = error.status
                await self.end(b"data: " + error.json() + b"\n\n")
                return
            headers = [(k.encode(), v.encode("latin-1")) for k, v in error.headers.items()]
            await self.whole(error.json(), error.status, headers)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._visit.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, (b"x-request-id", self._visit.id.encode())],
            }
        )


@asynccontextmanager
async def _cancelled_when_gone(receive: Receive) -> Any:
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


class _Endpoint:
    """An ASGI application for one path: nothing of Starlette stands between it and a stream."""

    def __init__(self, gateway: Gateway, read: Reader) -> None:
        self._gateway = gateway
        self._read = read

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        await self._gateway.answer(scope, receive, send, self._read)


def make_app(settings: Settings) -> Starlette:
    """Return the application; it connects to Triton when it is first asked."""
    gateway = Gateway(settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        del app
        yield
        await gateway.close()

    def guarded(handle: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
        async def endpoint(request: Any) -> Response:
            try:
                return await handle(request, gateway.who(request.headers))
            except ApiError as error:
                return JSONResponse(error.body(), error.status, error.headers)
            except LLMServeError as error:
                failure = from_llmserve(error)
                return JSONResponse(failure.body(), failure.status, failure.headers)

        return endpoint

    async def models(request: Any, key: Key | None) -> Response:
        del request
        found = await gateway.models(key)
        return JSONResponse({"object": "list", "data": [_model(info) for info in found]})

    async def model(request: Any, key: Key | None) -> Response:
        name = request.path_params["name"]
        for info in await gateway.models(key):
            if info.name == name:
                return JSONResponse(_model(info))
        raise ApiError(404, f"there is no model {name!r}", param="model", code="model_not_found")

    async def live(request: Any) -> Response:
        del request
        return Response(status_code=200)

    async def ready(request: Any) -> Response:
        del request
        if gateway.admission.draining:
            return JSONResponse({"ready": False, "why": "shutting down"}, 503)
        try:
            names = await asyncio.wait_for(gateway.ready_models(), 2)
        except (LLMServeError, asyncio.TimeoutError) as error:
            return JSONResponse({"ready": False, "why": str(error) or "no answer in 2 s"}, 503)
        return JSONResponse({"ready": bool(names), "models": names}, 200 if names else 503)

    async def metrics(request: Any, key: Key | None) -> Response:
        del request, key
        gateway.metrics.waiting.set(gateway.admission.waiting)
        return Response(gateway.metrics.text(), media_type="text/plain; version=0.0.4")

    async def missing(request: Any, error: Any) -> Response:
        del error
        what = f"there is nothing at {request.method} {request.url.path}"
        failure = ApiError(404, what, code="not_found")
        return JSONResponse(failure.body(), failure.status)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", _Endpoint(gateway, read_chat), methods=["POST"]),
            Route("/v1/completions", _Endpoint(gateway, read_completion), methods=["POST"]),
            Route("/v1/models", guarded(models)),
            Route("/v1/models/{name:path}", guarded(model)),
            Route("/livez", live),
            Route("/readyz", ready),
            Route("/health", ready),
            Route("/metrics", guarded(metrics)),
            Mount("/", StaticFiles(directory=PAGE, html=True)),
        ],
        exception_handlers={404: missing, 405: missing},
        lifespan=lifespan,
    )
    app.state.gateway = gateway
    return app


def _model(info: ModelInfo) -> dict[str, Any]:
    return {"id": info.name, "object": "model", "created": 0, "owned_by": "llmserve"}
