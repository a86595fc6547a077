"""A Ray Serve application: in each replica a Triton, and the gateway before it.

``llmserve deploy ray`` puts this file beside the settings that it is started with. It is yours.
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

_LOOK = 0.05
_CANARY_EVERY = 5.0
_PATIENCE = 60.0
"""Seconds for which a request waits for a Triton that is started anew."""
_MOST_DEATHS, _OF_LATE = 3, 60.0


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application; relative paths in ``args`` begin at this file's folder."""
    return serve.deployment(serve.ingress()(Triton)).bind(args)


class Waiting:
    """Lets requests for an answer wait while there is no Triton: none of them has failed yet."""

    def __init__(self, app: ASGIApp, there: asyncio.Event) -> None:
        self._app = app
        self._there = there

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._there.wait(), _PATIENCE)
        await self._app(scope, receive, send)


class Triton:
    """One replica. Triton ends with it, however it ends: a guard sees to that."""

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
        self._there = asyncio.Event()

    async def __serve_build_asgi_app__(self) -> Starlette:
        self._server: Server = await asyncio.to_thread(start, self._settings)
        self._there.set()
        self._watch = asyncio.ensure_future(self._keep_up())
        args = self._args
        app = make_app(
            Settings(
                url=self._server.grpc_url,
                # It refuses before Ray would, for it says why as the API has it.
                limits=Limits(args["concurrency"], args["queue"]),
                keys=self._keys,
                models=tuple(args["models"]),
                open_metrics=args["open_metrics"],
                triton_metrics=self._server.metrics_url,
                canary_interval=_CANARY_EVERY,
            )
        )
        self._gateway: Gateway = app.state.gateway
        app.add_middleware(Waiting, there=self._there)
        return app

    async def check_health(self) -> None:
        """Have Ray replace this replica where a model does not answer: canaries ask each."""
        why = self._failed
        if self._there.is_set():
            state = await self._gateway.catalog.state()
            silent = [f"{n}: {m['why']}" for n, m in state["models"].items() if not m["ready"]]
            why = "; ".join(silent) or state.get("why", "")
        if why:
            raise RuntimeError(why)

    async def _keep_up(self) -> None:
        """Start Triton anew where it was, which is quicker than a new replica would be."""
        ports = self._server.ports
        again = replace(
            self._settings, http_port=ports.http, grpc_port=ports.grpc, metrics_port=ports.metrics
        )
        deaths: list[float] = []
        while True:
            while self._server.wait(0) is None:
                await asyncio.sleep(_LOOK)
            self._there.clear()
            deaths = [then for then in deaths if time.monotonic() - then < _OF_LATE]
            deaths.append(time.monotonic())
            try:
                if len(deaths) > _MOST_DEATHS:
                    raise LLMServeError(
                        f"Triton died {len(deaths)} times, see {self._server.log_file}"
                    )
                self._server = await asyncio.to_thread(start, again)
            except LLMServeError as error:
                self._failed = str(error)
                return
            await self._gateway.disconnect()
            self._there.set()

    async def __del__(self) -> None:
        # Ray calls it when nothing is under way any more.
        if self._there.is_set():
            self._watch.cancel()
            await asyncio.to_thread(self._server.stop)
