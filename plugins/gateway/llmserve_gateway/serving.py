"""Run a gateway: who may listen where, and how it ends without cutting anybody off."""

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
_MOST_HEAD_BYTES = 1 << 20
# Java's client offers HTTP/2 with every request, and the parser leaves unread what is behind that.
_OFFER = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


@dataclass(frozen=True)
class Listening:
    """Where a gateway listens; without keys only on this machine, unless told otherwise."""

    host: str = "127.0.0.1"
    port: int = 8080
    grace: float = 30.0
    no_auth: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    idle_seconds: float = 75.0
    """How long a connection is kept for another request."""
    header_seconds: float = 10.0
    unread_seconds: float = 60.0
    """How long a client may leave unread what is sent to it."""
    spare_connections: int = 256
    """How many more there may be than requests under way and waiting."""


def run(settings: Settings, listening: Listening, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; what is under way may end within the grace."""
    if not listening.no_auth and not settings.keys:
        refuse_open(listening.host)
    _check_tls(listening)
    uvloop.run(_serve(settings, listening, _listener(listening), say))


def _check_tls(listening: Listening) -> None:
    if not listening.tls_cert:
        if listening.tls_key:
            raise UsageError("--tls-key alone makes no https", mend="give --tls-cert as well")
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(listening.tls_cert, listening.tls_key)
    except OSError as error:
        raise UsageError(
            f"--tls-cert {listening.tls_cert} cannot be used ({error})",
            mend="it holds a certificate in PEM, and --tls-key the key to that",
        ) from None


def _listener(listening: Listening) -> socket.socket:
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
    """Uvicorn closes its listener on a signal at once; here the signals are ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _protocol(most: int, header_seconds: float, unread_seconds: float) -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol for connections that are bounded in number and in patience."""

    class Bounded(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._headers_due: Any = None
            self._reading_due: Any = None
            self._cycles: deque[Any] = deque()
            self._begin_head()
            if len(self.connections) > most:
                transport.close()
            else:
                self._wait_for_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers_came()
            self._has_read()
            super().connection_lost(exc)
            for cycle in self._cycles:
                # Uvicorn tells only the last of those that a client has sent behind one another.
                cycle.disconnected = True
                cycle.message_event.set()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._has_read()
            # Who reads nothing would keep its place for ever.
            self._reading_due = self.loop.call_later(unread_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._has_read()

        def _has_read(self) -> None:
            if self._reading_due is not None:
                self._reading_due.cancel()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._wait_for_headers()

        def on_headers_complete(self) -> None:
            self._headers_came()
            self._in_head = False
            super().on_headers_complete()
            while self._cycles and self._cycles[0].response_complete:
                self._cycles.popleft()
            self._cycles.append(self.cycle)

        def on_message_complete(self) -> None:
            self._begin_head()
            super().on_message_complete()

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                head, end, rest = data.partition(b"\r\n\r\n")
                data = _OFFER.sub(b"", head) + end + rest
            super().data_received(data)
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > _MOST_HEAD_BYTES:
                    self.send_400_response("The headers are too long.")

        def _begin_head(self) -> None:
            self._in_head, self._head_bytes = True, 0

        def _wait_for_headers(self) -> None:
            self._headers_came()
            self._headers_due = self.loop.call_later(header_seconds, self.transport.close)

        def _headers_came(self) -> None:
            if self._headers_due is not None:
                self._headers_due.cancel()

    return Bounded


async def _serve(
    settings: Settings, listening: Listening, listener: socket.socket, say: Callable[[str], None]
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
            # It counts them with the loop's clock, which takes parts of a second too.
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
        raise ServerError("the gateway did not start", mend="its log says why")
    scheme = "https" if listening.tls_cert else "http"
    host = f"[{listening.host}]" if ":" in listening.host else listening.host
    say(f"{scheme}://{host}:{listener.getsockname()[1]}/v1")
    await _drained(gateway, serving, listening.grace)
    server.should_exit = True
    await serving


async def _drained(gateway: Gateway, serving: asyncio.Future[None], grace: float) -> None:
    """Wait for a signal, then until nothing is under way; a second signal ends it at once."""
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def note() -> None:
        second.set() if first.is_set() else first.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, note)
    told = asyncio.ensure_future(first.wait())
    ends: list[asyncio.Future[Any]] = [told, serving]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    gateway.admission.draining = True
    end = loop.time() + grace
    while gateway.admission.running and loop.time() < end and not second.is_set():
        await asyncio.sleep(_POLL)
