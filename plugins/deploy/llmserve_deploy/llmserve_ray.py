"""A Ray Serve application: each replica runs a Triton with the gateway in front of it.

``llmserve deploy ray`` writes this file next to its settings. You may edit it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import serve
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from llmserve.server import Reconciler, ServerSettings, start
from llmserve_gateway.admission import Limits
from llmserve_gateway.app import make_app
from llmserve_gateway.gateway import Gateway, Settings

log = logging.getLogger("ray.serve")

_RESTART_SECONDS = 60.0
"""How long a request waits for a Triton that is restarting."""


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
            texts={name: (text, answer) for name, (text, answer) in args.get("texts", {}).items()},
        )
        self._ready = asyncio.Event()

    async def __serve_build_asgi_app__(self) -> Starlette:
        server = await asyncio.to_thread(start, self._settings)
        self._reconciler = Reconciler([self._settings], [server], log.info)
        self._ready.set()
        self._watcher = asyncio.ensure_future(self._keep())
        args = self._args
        app = make_app(
            Settings(
                (server.address,),
                # The gateway refuses requests before Ray would, with the API's own error.
                limits=Limits(args["concurrency"], args["queue"]),
                keys=self._keys,
                models=tuple(args["models"]),
                open_metrics=args["open_metrics"],
                supervisor=self._reconciler.report,
            )
        )
        self._gateway: Gateway = app.state.gateway
        app.add_middleware(WaitForTriton, ready=self._ready)
        return app

    async def check_health(self) -> None:
        """Raise an error, so that Ray replaces this replica, if a model cannot be kept alive."""
        if self._watcher.done():
            self._watcher.result()
        why = "; ".join(sorted(self._reconciler.why_it_failed()))
        if self._ready.is_set() and not why:
            state = await self._gateway.catalog.state()
            silent = [f"{n}: {m['why']}" for n, m in state["models"].items() if not m["ready"]]
            why = "; ".join(silent) or state.get("why", "")
        if why:
            raise RuntimeError(why)

    async def _keep(self) -> None:
        """Restart a dead Triton at the same ports, which is faster than a new replica."""
        while True:
            self._reconciler.step()
            if not self._reconciler.alive:
                self._ready.clear()
            elif not self._ready.is_set():
                await self._gateway.disconnect()
                self._ready.set()
            await self._reconciler.wait()

    async def __del__(self) -> None:
        # Ray calls this when no request is in flight any more.
        if self._ready.is_set():
            self._watcher.cancel()
            await self._reconciler.settle()
            for server in self._reconciler.servers:
                await asyncio.to_thread(server.stop)
