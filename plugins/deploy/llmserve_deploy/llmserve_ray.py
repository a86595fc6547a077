"""A Ray Serve application: each replica runs a Triton with the gateway in front of it.

``llmserve deploy ray`` writes this file next to its settings. You may edit it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import serve
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from llmserve.errors import LLMServeError
from llmserve.server import Server, ServerSettings, start
from llmserve_gateway.admission import Limits
from llmserve_gateway.app import make_app
from llmserve_gateway.gateway import Gateway, Settings

_POLL_SECONDS = 0.05
_CANARY_EVERY = 5.0
_RESTART_SECONDS = 60.0
"""How long a request waits for a Triton that is restarting."""
_MAX_DEATHS, _DEATH_WINDOW = 3, 60.0


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application; relative paths in ``args`` start at this file's folder."""
    return serve.deployment(serve.ingress()(Triton)).bind(args)


class WaitForTriton:
    """Middleware that holds POST requests while Triton restarts, so that they do not fail."""

    def __init__(self, app: ASGIApp, ready: asyncio.Event) -> None:
        self._app = app
        self._ready = ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ready.wait(), _RESTART_SECONDS)
        await self._app(scope, receive, send)


class Triton:
    """One replica. A guard process stops Triton when the replica ends, however it ends."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        here = Path(__file__).parent
        self._args = args
        self._keys = here / args["keys"] if args["keys"] else None
        self._settings = ServerSettings(
            repository=here / args["repository"],
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            models=tuple(args["load"]),
            grace=args["grace"],
        )
        self._failed = ""
        self._ready = asyncio.Event()

    async def __serve_build_asgi_app__(self) -> Starlette:
        self._server: Server = await asyncio.to_thread(start, self._settings)
        self._ready.set()
        self._watcher = asyncio.ensure_future(self._restart_when_dead())
        args = self._args
        app = make_app(
            Settings(
                (self._server.address,),
                # The gateway refuses requests before Ray would, with the API's own error.
                limits=Limits(args["concurrency"], args["queue"]),
                keys=self._keys,
                models=tuple(args["models"]),
                open_metrics=args["open_metrics"],
                canary_interval=_CANARY_EVERY,
            )
        )
        self._gateway: Gateway = app.state.gateway
        app.add_middleware(WaitForTriton, ready=self._ready)
        return app

    async def check_health(self) -> None:
        """Raise an error, so that Ray replaces this replica, if canaries find a model silent."""
        why = self._failed
        if self._ready.is_set():
            state = await self._gateway.catalog.state()
            silent = [f"{n}: {m['why']}" for n, m in state["models"].items() if not m["ready"]]
            why = "; ".join(silent) or state.get("why", "")
        if why:
            raise RuntimeError(why)

    async def _restart_when_dead(self) -> None:
        """Restart a dead Triton at the same ports, which is faster than a new replica."""
        ports = self._server.ports
        settings = replace(
            self._settings, http_port=ports.http, grpc_port=ports.grpc, metrics_port=ports.metrics
        )
        deaths: list[float] = []
        while True:
            while self._server.wait(0) is None:
                await asyncio.sleep(_POLL_SECONDS)
            self._ready.clear()
            deaths = [at for at in deaths if time.monotonic() - at < _DEATH_WINDOW]
            deaths.append(time.monotonic())
            try:
                if len(deaths) > _MAX_DEATHS:
                    raise LLMServeError(
                        f"Triton died {len(deaths)} times, see {self._server.log_file}"
                    )
                self._server = await asyncio.to_thread(start, settings)
            except LLMServeError as error:
                self._failed = str(error)
                return
            await self._gateway.disconnect()
            self._ready.set()

    async def __del__(self) -> None:
        # Ray calls this when no request is in flight any more.
        if self._ready.is_set():
            self._watcher.cancel()
            await asyncio.to_thread(self._server.stop)
