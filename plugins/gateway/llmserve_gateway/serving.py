"""The gateway's HTTP server: listening address, connection limits and graceful shutdown."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llmserve.errors import PortInUseError, ServerError, UsageError
from llmserve_gateway.addresses import refuse_open
from llmserve_gateway.app import make_app
from llmserve_gateway.gateway import Gateway, Settings

_POLL = 0.05
_MAX_HEADER_BYTES = 1 << 20
# Java's client offers HTTP/2 with every request, and the parser does not read on after the offer.
_UPGRADE_HEADER = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


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
    unread_seconds: float = 60.0
    """How long a client may leave a response unread."""
    spare_connections: int = 256
    """How many more connections than running and waiting requests there may be."""


def run(settings: Settings, listening: Listening, report: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; requests in flight may end within the grace period."""
    if not listening.no_auth and not settings.keys:
        refuse_open(listening.host)
    _check_tls(listening)
    uvloop.run(_serve(settings, listening, _bind(listening), report))


def _check_tls(listening: Listening) -> None:
    if not listening.tls_cert:
        if listening.tls_key:
            raise UsageError("--tls-key needs --tls-cert", mend="give the certificate as well")
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(listening.tls_cert, listening.tls_key)
    except OSError as error:
        raise UsageError(
            f"--tls-cert {listening.tls_cert} cannot be used ({error})",
            mend="give a PEM certificate, and its key with --tls-key",
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
            f"cannot listen on {where}: {error.strerror}", mend="choose another --port"
        ) from None
    return listener


class _Server(uvicorn.Server):
    """A server that leaves signals to us; uvicorn would close its listener at once."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _protocol(limit: int, header_seconds: float, unread_seconds: float) -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol with limits on connections, header time and unread time."""

    class BoundedProtocol(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._header_timer: Any = None
            self._unread_timer: Any = None
            self._cycles: deque[Any] = deque()
            self._begin_headers()
            if len(self.connections) > limit:
                transport.close()
            else:
                self._start_header_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_header_timer()
            self._stop_unread_timer()
            super().connection_lost(exc)
            for cycle in self._cycles:
                # Of several pipelined requests, uvicorn only notifies the last.
                cycle.disconnected = True
                cycle.message_event.set()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stop_unread_timer()
            # A client that reads nothing would occupy its slot for ever.
            self._unread_timer = self.loop.call_later(unread_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_unread_timer()

        def _stop_unread_timer(self) -> None:
            if self._unread_timer is not None:
                self._unread_timer.cancel()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._start_header_timer()

        def on_headers_complete(self) -> None:
            self._stop_header_timer()
            self._in_headers = False
            super().on_headers_complete()
            while self._cycles and self._cycles[0].response_complete:
                self._cycles.popleft()
            self._cycles.append(self.cycle)

        def on_message_complete(self) -> None:
            self._begin_headers()
            super().on_message_complete()

        def data_received(self, data: bytes) -> None:
            if self._in_headers:
                head, end, rest = data.partition(b"\r\n\r\n")
                data = _UPGRADE_HEADER.sub(b"", head) + end + rest
            super().data_received(data)
            if self._in_headers:
                self._header_bytes += len(data)
                if self._header_bytes > _MAX_HEADER_BYTES:
                    self.send_400_response("The headers are too long.")

        def _begin_headers(self) -> None:
            self._in_headers, self._header_bytes = True, 0

        def _start_header_timer(self) -> None:
            self._stop_header_timer()
            self._header_timer = self.loop.call_later(header_seconds, self.transport.close)

        def _stop_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()

    return BoundedProtocol


async def _serve(
    settings: Settings, listening: Listening, listener: socket.socket, report: Callable[[str], None]
) -> None:
    app = make_app(settings)
    gateway: Gateway = app.state.gateway
    limits = settings.limits
    connections = limits.max_requests + limits.max_queue + listening.spare_connections
    server = _Server(
        uvicorn.Config(
            app,
            http=_protocol(connections, listening.header_seconds, listening.unread_seconds),
            ws="none",
            access_log=False,
            log_level="warning",
            # Typed as int, but passed to the loop's clock, which accepts fractions as well.
            timeout_keep_alive=cast("int", listening.idle_seconds),
            timeout_graceful_shutdown=1,
            ssl_certfile=listening.tls_cert,
            ssl_keyfile=listening.tls_key,
        )
    )
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(_POLL)
    if serving.done():
        await serving
        raise ServerError("the gateway did not start", mend="see its log")
    scheme = "https" if listening.tls_cert else "http"
    host = f"[{listening.host}]" if ":" in listening.host else listening.host
    report(f"{scheme}://{host}:{listener.getsockname()[1]}/v1")
    await _run_until_signal(gateway, serving, listening.grace)
    server.should_exit = True
    await serving


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
