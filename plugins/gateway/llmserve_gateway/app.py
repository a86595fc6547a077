"""The gateway as an ASGI application: its routes, its page, and what is said of paths it lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import asynccontextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Mount, Route
from starlette.staticfiles import StaticFiles

from llmserve.plugin import Address
from llmserve_gateway import anthropic, ollama
from llmserve_gateway.batches.folder import Folder
from llmserve_gateway.batches.routes import BatchRoutes
from llmserve_gateway.batches.runner import Runner
from llmserve_gateway.bodies import Receive
from llmserve_gateway.conversation_routes import ConversationRoutes
from llmserve_gateway.dialects import Dialect
from llmserve_gateway.document import make_document
from llmserve_gateway.endpoints import (
    ASKED,
    ENDPOINTS,
    OF_BATCHES,
    OF_CONVERSATIONS,
    OF_OLLAMA,
    OF_RELEASES,
    OF_RESPONSES,
    OWN,
    PLACES,
    Endpoint,
)
from llmserve_gateway.errors import ApiError
from llmserve_gateway.gateway import Gateway, Settings
from llmserve_gateway.headers import HeaderChecks
from llmserve_gateway.ollama_routes import OllamaRoutes
from llmserve_gateway.releases.routes import ReleaseRoutes
from llmserve_gateway.replicas import Replicas
from llmserve_gateway.reply import Send
from llmserve_gateway.response_routes import ResponseRoutes
from llmserve_gateway.routes import Routes, failure

PAGE = Path(__file__).with_name("page")
_END_SECONDS = 5.0
"""How long what runs beside requests may take to end."""

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    # Its files belong together: after an update, none may come from a browser's cache.
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}

# Parts of OpenAI's API that clients ask for, and that have no place in this server.
_ABSENT = {
    "/v1/audio": "speech or transcription",
    "/v1/images": "images",
    "/v1/videos": "videos",
    "/v1/moderations": "moderation",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/assistants": "assistants",
    "/v1/threads": "assistants",
    "/v1/realtime": "realtime sessions",
}

# What Ollama's clients do with models, and which command does it here.
_OLLAMA = {
    "create": "build", "copy": "build", "delete": "remove", "push": "export", "blobs": "build",
}  # fmt: skip
_BASE = (
    "the base address of OpenAI's clients is this server's with /v1, that of Anthropic's without"
)


class Asked:
    """An ASGI application for one path; it streams without going through Starlette."""

    def __init__(self, gateway: Gateway, dialect: Dialect[Any]) -> None:
        self._gateway = gateway
        self._dialect = dialect

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        await self._gateway.answer(scope, receive, send, self._dialect)


class Page(StaticFiles):
    """The files of the page, which no other page may frame and which load nothing of others."""

    async def get_response(self, path: str, scope: Any) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


def _absent(path: str) -> str:
    """Return what to say of a part of OpenAI's API that this server does not have; else nothing."""
    for prefix, what in _ABSENT.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return f": this server has text models, and no {what}; GET /openapi.json lists it all"
    return ""


def is_ollamas(path: str) -> bool:
    """Return whether a path is one of Ollama's API, there or not."""
    return path.startswith("/api/") and "/v1" not in path


def _error_body(path: str) -> Callable[[ApiError], bytes]:
    """Return how the API that a path is of writes an error."""
    if "/v1/messages" in path:
        return anthropic.error_body
    return ollama.error_body if is_ollamas(path) else ApiError.json


def _meant(path: str, known: Collection[str]) -> str:
    """Return where a client with a wrong address wanted to go; nothing if that is unclear."""
    parts = [part for part in path.split("/") if part]
    if is_ollamas(path) and (command := _OLLAMA.get(parts[1] if parts[1:] else "")):
        return f": no request does that here, but llmserve {command}"
    if parts == ["v1"]:
        return f": {_BASE}, and GET /v1/models lists the models"
    for at in range(len(parts)):
        # What is under an endpoint is a part of it, unless it is that endpoint again.
        before, rest = "/" + "/".join(parts[:at]), "/".join(parts[at:])
        for place in (f"/v1/{rest}", f"/{rest}"):
            if place in known and place != path and before not in {*known} - {place}:
                return f": {place} is; {_BASE}"
    # Paths have much in common by chance, as /v1/messages and /v1/messages/batches do.
    close = get_close_matches(path, known, n=1, cutoff=0.85)
    return f": did you mean {close[0]}?" if close else ""


def make_app(
    settings: Settings, connect: Callable[[Sequence[Address]], Replicas] = Replicas
) -> Starlette:
    """Return the application; it connects to Triton on the first request."""
    gateway = Gateway(settings, places=PLACES, connect=connect)
    folder = Folder(settings.batches) if settings.batches else None
    runner = Runner(gateway, folder, lambda *call: app(*call)) if folder else None
    keeps, stores = folder is not None, gateway.responses is not None
    routes = Routes(gateway, partial(make_document, batches=keeps, responses=stores))
    kept, conversations = ResponseRoutes(gateway), ConversationRoutes(gateway)
    batches, ollamas = BatchRoutes(runner), OllamaRoutes(gateway, routes)
    of_releases = ReleaseRoutes(gateway)
    gateway.releases.make_room_too()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        del app
        tasks = [asyncio.ensure_future(gateway.catalog.watch(settings.canary_interval))]
        if runner is not None:
            tasks.append(asyncio.ensure_future(runner.run()))
        yield
        await gateway.releases.close()
        for task in tasks:
            task.cancel()
        # Not without end: before Python 3.12, `wait_for` may lose a cancellation.
        await asyncio.wait(tasks, timeout=_END_SECONDS)
        if folder is not None:
            folder.close()
        await gateway.close()

    def answering(row: Endpoint[Any], answers: Any) -> Route:
        is_open = row.access == "anyone" or (row.access == "key or open" and settings.open_metrics)
        endpoint = routes.guarded(partial(row.answer, answers), row.error_body, keyed=not is_open)
        return Route(row.path, endpoint, methods=[row.method])

    api_routes = [
        *(Route(row.path, Asked(gateway, row.answer), methods=[row.method]) for row in ASKED),
        *(answering(row, routes) for row in OWN),
        *(answering(row, ollamas) for row in OF_OLLAMA),
        *(answering(row, batches) for row in OF_BATCHES),
        *(answering(row, kept) for row in OF_RESPONSES),
        *(answering(row, conversations) for row in OF_CONVERSATIONS),
        *(answering(row, of_releases) for row in OF_RELEASES),
    ]

    async def missing(request: Request, error: Any) -> Response:
        del error
        path = request.url.path[:200]
        body = _error_body(path)
        partial_matches = (
            route for route in api_routes if route.matches(request.scope)[0] == Match.PARTIAL
        )
        if methods := {method for route in partial_matches for method in route.methods or ()}:
            allowed = ", ".join(sorted(methods))
            what = f"{path} accepts {allowed}, not {request.method}"
            return failure(ApiError(405, what, headers={"allow": allowed}), body)
        hint = _absent(path) or _meant(path, [row.path for row in ENDPOINTS])
        what = f"there is no endpoint {request.method} {path}{hint}"
        return failure(ApiError(404, what, code="not_found"), body)

    origins = settings.cors_origins
    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"],
                      allow_headers=["*"])  # fmt: skip
    checks = Middleware(HeaderChecks, hosts=settings.hosts, origins=settings.origins)
    app = Starlette(
        routes=[*api_routes, Mount("/", Page(directory=PAGE, html=True))],
        middleware=[checks, cors] if origins else [checks],
        exception_handlers={404: missing, 405: missing},
        lifespan=lifespan,
    )
    app.state.gateway = gateway
    return app
