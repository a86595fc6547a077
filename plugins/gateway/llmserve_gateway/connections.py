"""Connections of clients: a clock for each of them, and room for new ones.

An HTTP server's protocol, such as uvicorn's, reads the requests and writes the responses. The
protocol here stands between it and the transport, and knows at any time whether the gateway waits
for the client. A client that keeps it waiting for too long is disconnected; when there are too many
connections, the one that has kept it waiting for longest makes room.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import httptools

_MAX_HEAD_BYTES = 64 << 10
_MAX_FRAME_BYTES = 64 << 10
"""Of a body in chunks, between two pieces or after the last, where more headers may come."""
_HEAD_END = b"\r\n\r\n"
_HEAD_TOO_LONG = b"\r\n".join(
    [b"HTTP/1.1 431 Request Header Fields Too Large", b"content-length: 0", b"connection: close"]
    + [b""] * 2
)
# Java's client offers HTTP/2 with every request, and the parser does not read on after the offer.
_UPGRADE_HEADER = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
_STATE = "llmserve.connection"
_MAX_AGREEING = 128
"""How many clients may be agreeing on encryption; the one that has taken longest makes room."""
_UNHURRIED = 1 / 20
"""The share of the time for a head that each of them has, while others wait to be accepted."""
_MAX_PERIOD = 1.0

AsgiApp = Callable[[Any, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]],
                   Awaitable[None]]  # fmt: skip


@dataclass(frozen=True)
class Clocks:
    """How many seconds a client may take: for the headers of a request, for its body, until its
    next request, and to read what is sent to it."""

    head: float
    body: float
    idle: float
    unread: float

    @property
    def period(self) -> float:
        """How often the clocks are looked at."""
        return min(_MAX_PERIOD, min(self.head, self.body, self.idle, self.unread) / 4)


class _Wait(NamedTuple):
    """The gateway has waited for a client since a moment, and may for a number of seconds."""

    since: float
    allowed: float


class Connections:
    """All open connections, at most ``limit`` of them."""

    def __init__(self, limit: int, clocks: Clocks, inner: Callable[..., asyncio.Protocol]) -> None:
        self.clocks = clocks
        self._limit = limit
        self._inner = inner
        self._open: set[Connection] = set()
        self._agreeing: dict[asyncio.Task[None], float] = {}
        """When each began, in this order."""

    def new(self, *, app_state: Mapping[str, Any], **arguments: Any) -> Connection:
        """Return the protocol for a new connection; the arguments are the inner protocol's."""
        connection = Connection(self)
        # The state of the application is the part of a request's scope that servers may extend.
        state = {**app_state, _STATE: connection}
        connection.inner = self._inner(app_state=state, **arguments)
        return connection

    def add(self, connection: Connection) -> bool:
        """Add a connection, in place of another if necessary; False if there is no room."""
        if len(self._open) >= self._limit and not self._make_room():
            return False
        self._open.add(connection)
        return True

    def discard(self, connection: Connection) -> None:
        self._open.discard(connection)

    async def watch(self) -> None:
        """End the connections of clients that take too long."""
        while True:
            await asyncio.sleep(self.clocks.period)
            now = time.monotonic()
            for connection in list(self._open):
                connection.check(now)

    async def accept(
        self, listener: socket.socket, tls: ssl.SSLContext, new: Callable[[], Connection]
    ) -> None:
        """Accept encrypted connections.

        A server of the loop tells of a client only when they have agreed on the encryption, and any
        number of clients may say nothing until then.
        """
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    client, _ = await loop.sock_accept(listener)
                except OSError:  # for example, there are too many files
                    await asyncio.sleep(self.clocks.period)
                    continue
                while len(self._agreeing) >= _MAX_AGREEING:
                    await self._agree_or_end()
                task = asyncio.ensure_future(self._agree(client, tls, new))
                self._agreeing[task] = time.monotonic()
                task.add_done_callback(lambda task: self._agreeing.pop(task, None))
        finally:
            for task in [*self._agreeing]:
                task.cancel()

    async def _agree_or_end(self) -> None:
        """Wait until a client has agreed; end the oldest one that had its time.

        Very many right clients may come at the same moment, as for a load test.
        """
        oldest, since = next(iter(self._agreeing.items()))
        left = since + _UNHURRIED * self.clocks.head - time.monotonic()
        if left > 0:
            await asyncio.wait(self._agreeing, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        else:
            del self._agreeing[oldest]
            oldest.cancel()

    async def _agree(
        self, client: socket.socket, tls: ssl.SSLContext, new: Callable[[], Connection]
    ) -> None:
        loop, seconds = asyncio.get_running_loop(), self.clocks.head
        # What it says may be no TLS, or nothing.
        with suppress(OSError):
            await loop.connect_accepted_socket(new, client, ssl=tls, ssl_handshake_timeout=seconds)

    def _make_room(self) -> bool:
        waits = {connection: wait for connection in self._open if (wait := connection.wait())}
        if not waits:
            return False
        # Clients with a key come last, and the client with the most connections comes first.
        counts = Counter(connection.peer for connection in waits if not connection.has_key)
        victim = max(waits, key=lambda c: (not c.has_key, counts[c.peer], -waits[c].since))
        self.discard(victim)
        victim.abort()
        return True


class Connection(asyncio.Protocol):
    """One connection; everything that arrives on it is passed on to the ``inner`` protocol."""

    def __init__(self, connections: Connections) -> None:
        self.inner: asyncio.Protocol | None = None
        self.peer = b""
        self.has_key = False
        """Whether a request of this connection had a valid key."""
        self._connections = connections
        self._transport: Any = None
        self._lost = asyncio.Event()
        self._parser: Any = httptools.HttpRequestParser(self)
        # As in uvicorn: both have to find the same requests.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._part: Literal["", "head", "body"] = "head"
        """The part of a request that the client is sending."""
        self._part_since = self._idle_since = time.monotonic()
        self._begun = self._answered = self._running = 0
        self._head_bytes = 0
        self._frame_bytes = 0
        """What has arrived of a body that is none of its content, since the last piece of that."""
        self._by_line = True
        self._line = b""
        self._last = b""
        """The last bytes that arrived, in which the end of a head may have begun."""
        self._body_seconds: float | None = None
        """How long the body may take of the request that is being sent, if not as all others."""
        self._unread_since: float | None = None
        self._closing_since: float | None = None

    # What the inner protocol's application tells

    @contextmanager
    def answering(self) -> Iterator[None]:
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._answered += 1
            self._idle_since = time.monotonic()

    def listener(self, receive: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        """Return a ``receive`` that hears of the end of the connection behind a pipelined request.

        Of several pipelined requests, uvicorn only notifies the last.
        """
        complete = False

        async def listen() -> Any:
            nonlocal complete
            if complete:
                await self._lost.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            complete = message["type"] == "http.disconnect" or not message.get("more_body")
            return message

        return listen

    def allow_body(self, seconds: float) -> None:
        if self._part == "body":
            self._body_seconds = seconds

    # Clocks

    def wait(self) -> _Wait | None:
        """Return how the gateway waits for this client; None if the client waits for it."""
        clocks = self._connections.clocks
        if self._closing_since is not None:
            return _Wait(self._closing_since, clocks.unread)
        if self._unread_since is not None:
            return _Wait(self._unread_since, clocks.unread)
        # The protocol reads no request before those in front of it have been answered.
        if self._part and self._begun <= self._answered + 1:
            since = max(self._part_since, self._idle_since)
            body = clocks.body if self._body_seconds is None else self._body_seconds
            return _Wait(since, clocks.head if self._part == "head" else body)
        return None if self._running else _Wait(self._idle_since, clocks.idle)

    def check(self, now: float) -> None:
        if self._closing_since is None and self._transport.is_closing():
            self._closing_since = now
        wait = self.wait()
        if wait is None or now - wait.since <= wait.allowed:
            return
        if self._unread_since is None and self._closing_since is None:
            self._transport.close()
        else:
            # What it has not read would keep the connection open.
            self._transport.abort()

    def abort(self) -> None:
        self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.peer = _peer(transport.get_extra_info("peername"))
        if not self._connections.add(self):
            self.inner = None
            transport.abort()
        elif self.inner is not None:
            self.inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self.inner is None:
            return
        if not self._part:
            self._begin_head(by_line=True)
        if self._part == "head":
            if self._by_line:
                data = self._whole_lines(data)
            else:
                head = (self._last + data).partition(_HEAD_END)[0]
                self._head_bytes += max(0, len(head) - len(self._last))
        else:
            self._frame_bytes += len(data)
        self._last = data[1 - len(_HEAD_END) :]
        if self._head_bytes + len(self._line) > _MAX_HEAD_BYTES:
            self._transport.write(b"" if self._running else _HEAD_TOO_LONG)
            self._transport.close()
        elif data:
            # The inner protocol refuses the request, or answers it as one of HTTP.
            with suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
                self._parser.feed_data(data)
            if self._frame_bytes > _MAX_FRAME_BYTES:
                # The inner protocol keeps all headers, however many come behind a body.
                self._transport.close()
            else:
                self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self.inner is None else self.inner.eof_received()

    def pause_writing(self) -> None:
        self._unread_since = time.monotonic()
        if self.inner is not None:
            self.inner.pause_writing()

    def resume_writing(self) -> None:
        self._unread_since = None
        if self.inner is not None:
            self.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self.inner is not None:
            self.inner.connection_lost(exc)
        self._lost.set()
        # They refer to each other, and would wait for the garbage collector.
        self.inner = self._parser = None

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        if not self._part:
            self._begin_head(by_line=False)
        self._begun += 1

    def on_headers_complete(self) -> None:
        self._part, self._part_since = "body", time.monotonic()
        self._frame_bytes = 0

    def on_body(self, body: bytes) -> None:
        del body
        self._frame_bytes = 0

    def on_message_complete(self) -> None:
        self._body_seconds = None
        self._part, self._head_bytes = "", 0
        self._frame_bytes = 0

    def _begin_head(self, *, by_line: bool) -> None:
        """Begin a head, line by line unless the end of its predecessor came with its beginning."""
        self._part, self._part_since = "head", time.monotonic()
        self._head_bytes, self._line, self._by_line = 0, b"", by_line

    def _whole_lines(self, data: bytes) -> bytes:
        """Return the lines of a head that are complete, without an offer to change the protocol."""
        data, self._line = self._line + data, b""
        if not self._head_bytes:
            data = data.lstrip(b"\r\n")  # Empty lines in front of a request are allowed.
        head, end, rest = data.partition(_HEAD_END)
        if not end:
            last = max(0, data.rfind(b"\r\n"))
            head, self._line = data[:last], data[last:]
        self._head_bytes += len(head)
        return _UPGRADE_HEADER.sub(b"", head) + end + rest


def watched(app: AsgiApp) -> AsgiApp:
    """Return an application whose connections know which of their requests are being answered."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        if (connection := _connection(scope)) is None:
            await app(scope, receive, send)
            return
        with connection.answering():
            await app(scope, connection.listener(receive), send)

    return run


def note_key(scope: Mapping[str, Any]) -> None:
    """Note that a request had a valid key: its connection is among the last to make room."""
    if (connection := _connection(scope)) is not None:
        connection.has_key = True


def note_upload(scope: Mapping[str, Any], seconds: float) -> None:
    """Give the body of a request, a file, more time than others have."""
    if (connection := _connection(scope)) is not None:
        connection.allow_body(seconds)


def _connection(scope: Mapping[str, Any]) -> Connection | None:
    connection = scope.get("state", {}).get(_STATE)
    return connection if isinstance(connection, Connection) else None


def _peer(address: Any) -> bytes:
    """Return what identifies a client; whoever has one address of IPv6 has its network."""
    with suppress(ValueError, TypeError, IndexError):
        packed = ipaddress.ip_address(address[0]).packed
        return packed if len(packed) == 4 else packed[:8]
    return b""
