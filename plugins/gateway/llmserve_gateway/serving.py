"""The gateway's HTTP server: listening address, connection limits and graceful shutdown."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop

# uvicorn (0.54) accepts a protocol, but offers its own by name only, and not to be wrapped.
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llmserve.errors import PortInUseError, ServerError, UsageError
from llmserve.plugin import is_loopback
from llmserve_gateway.addresses import refuse_open
from llmserve_gateway.app import make_app
from llmserve_gateway.connections import Clocks, Connection, Connections, watched
from llmserve_gateway.gateway import Gateway, Settings

_POLL = 0.05


@dataclass(frozen=True)
class Listening:
    """The address and limits of the listener; without keys or ``no_auth`` only on loopback."""

    host: str = "127.0.0.1"
    port: int = 8080
    grace: float = 30.0
    no_auth: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    idle_seconds: float = 75.0
    header_seconds: float = 10.0
    body_seconds: float = 45.0
    """How long a body may take, whether its request has been answered or not."""
    unread_seconds: float = 60.0
    """How long a client may leave a response unread."""
    spare_connections: int = 256
    """How many more connections than running and waiting requests there may be."""

    @property
    def clocks(self) -> Clocks:
        return Clocks(
            self.header_seconds, self.body_seconds, self.idle_seconds, self.unread_seconds
        )


def run(settings: Settings, listening: Listening, report: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; requests in flight may end within the grace period."""
    if not listening.no_auth and not settings.keys:
        refuse_open(listening.host)
    tls = _tls(listening)
    uvloop.run(_serve(settings, listening, tls, _bind(listening), report))


def _tls(listening: Listening) -> ssl.SSLContext | None:
    if not listening.tls_cert:
        if listening.tls_key:
            raise UsageError("--tls-key needs --tls-cert", hint="give the certificate as well")
        return None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(listening.tls_cert, listening.tls_key)
        return context
    except OSError as error:
        raise UsageError(
            f"--tls-cert {listening.tls_cert} cannot be used ({error})",
            hint="give a PEM certificate, and its key with --tls-key",
        ) from None


def _bind(listening: Listening) -> socket.socket:
    family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((listening.host, listening.port))
    except OSError as error:
        listener.close()
        where = f"{listening.host}:{listening.port}"
        raise PortInUseError(
            f"cannot listen on {where}: {error.strerror}", hint="choose another --port"
        ) from None
    return listener


class _Http(HttpToolsProtocol):
    """A protocol to which what comes behind a body is no header; uvicorn's (0.54) adds it.

    A proxy in front passes it on without a look, or drops it: none of it may be a key.
    """

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        # Those of the request have been handed over, and nobody reads these.
        self.headers = []


class _Server(uvicorn.Server):
    """A server that leaves signals to us; uvicorn would close its listener at once.

    No setting of uvicorn (0.54) does that.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: Any, listening: Listening, connections: Connections) -> _Server:
    return _Server(
        uvicorn.Config(
            watched(app),
            # Typed as a class, but only called.
            http=cast("type[asyncio.Protocol]", connections.new),
            ws="none",
            access_log=False,
            log_level="warning",
            # Typed as int, but passed to the loop's clock, which accepts fractions as well.
            timeout_keep_alive=cast("int", listening.idle_seconds),
            timeout_graceful_shutdown=1,
        )
    )


async def _serve(
    settings: Settings,
    listening: Listening,
    tls: ssl.SSLContext | None,
    listener: socket.socket,
    report: Callable[[str], None],
) -> None:
    app = make_app(replace(settings, local=is_loopback(listening.host)))
    gateway: Gateway = app.state.gateway
    limits = settings.limits
    limit = limits.max_requests + limits.max_queue + listening.spare_connections
    connections = Connections(limit, listening.clocks, _Http)
    server = _server(app, listening, connections)
    watching = asyncio.ensure_future(connections.watch())
    serving = asyncio.ensure_future(server.serve(sockets=[] if tls else [listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(_POLL)
    if serving.done():
        await serving
        raise ServerError("the gateway did not start", hint="see its log")
    if tls is not None:
        accepting = _accept(server, connections, listener, tls)
    scheme = "https" if tls else "http"
    host = f"[{listening.host}]" if ":" in listening.host else listening.host
    report(f"{scheme}://{host}:{listener.getsockname()[1]}/v1")
    await _run_until_signal(gateway, serving, listening.grace)
    server.should_exit = True
    if tls is not None:
        accepting.cancel()
    await serving
    watching.cancel()


def _accept(
    server: _Server, connections: Connections, listener: socket.socket, tls: ssl.SSLContext
) -> asyncio.Task[None]:
    """Accept encrypted connections, which the server then has like those that it accepts."""
    listener.setblocking(False)
    listener.listen(server.config.backlog)

    def new() -> Connection:
        return connections.new(
            config=server.config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
        )

    async def accept() -> None:
        with listener:
            await connections.accept(listener, tls, new)

    return asyncio.ensure_future(accept())


async def _run_until_signal(gateway: Gateway, serving: asyncio.Future[None], grace: float) -> None:
    """Wait for a signal and for requests in flight; a second signal ends the wait at once."""
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        second.set() if first.is_set() else first.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    signalled = asyncio.ensure_future(first.wait())
    events: list[asyncio.Future[Any]] = [signalled, serving]
    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
    gateway.admission.draining = True
    deadline = loop.time() + grace
    while gateway.admission.running and loop.time() < deadline and not second.is_set():
        await asyncio.sleep(_POLL)
