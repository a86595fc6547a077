"""Sends requests to a server with OpenAI's API, and receives its answers: in threads or asyncio.

Both send the same bytes and read answers with the same reader, its limits included. Whoever leaves
an answer before its end closes its connection, which cancels the request.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from llmserve.client.deadlines import Deadline, Timeout
from llmserve.client.http_answer import AnswerReader, BodyReader, BrokenAnswerError, LineReader

_PIECE = 64 << 10
_MOST_WAITING = 1 << 20
"""The bytes that may wait to be read by who has asked."""
_NOTICED_WITHIN = 0.05
"""Seconds in which a connection fails that its server had closed before the request came; if it
fails later, the server has worked on the request."""


class OpenAIRequest(NamedTuple):
    url: str
    headers: Mapping[str, str]
    body: bytes | None = None
    """None is to be sent with GET, anything else with POST."""

    def encoded(self) -> bytes:
        """Return what is sent on the connection."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        if not host.isascii():
            host = host.encode("idna").decode()
        lines = [f"{'GET' if self.body is None else 'POST'} {parts.path or '/'} HTTP/1.1"]
        lines += [f"host: {host}", "accept-encoding: identity"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if self.body is not None:
            lines.append(f"content-length: {len(self.body)}")
        if not all(line.isascii() and line.isprintable() for line in lines):
            raise ValueError("a request has a header or an address with an invalid character")
        return "\r\n".join([*lines, "", ""]).encode() + (self.body or b"")


class Peer(NamedTuple):
    """Where a server is."""

    host: str
    port: int
    is_encrypted: bool

    def encryption(self) -> ssl.SSLContext | None:
        if not self.is_encrypted:
            return None
        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])
        return context


class OpenAIAnswer:
    """An answer that a thread reads; closing it before its end cancels the request."""

    def __init__(self, peer: Peer, request: OpenAIRequest, timeout: Timeout = None) -> None:
        data = request.encoded()
        self._deadline = Deadline(timeout)
        self._reader = AnswerReader()
        self._first = b""
        self._socket = self._connect(peer)
        try:
            self._socket.settimeout(_left(self._deadline))
            # A server may refuse a request, and close, before it has read all of it.
            with suppress(BrokenPipeError, ConnectionResetError):
                self._socket.sendall(data)
            while not self._reader.status:
                self._first = self._receive()
        except BaseException:
            self.close()
            raise

    @property
    def status(self) -> int:
        return self._reader.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._reader.headers

    def read(self) -> bytes:
        body = BodyReader()
        for piece in self._pieces():
            body.feed(piece)
        return body.end()

    def lines(self) -> Generator[bytes, None, None]:
        """Yield the lines of a stream, each when it is whole."""
        lines = LineReader()
        for piece in self._pieces():
            yield from lines.feed(piece)
        yield from lines.end()

    def close(self) -> None:
        self._socket.close()

    def _connect(self, peer: Peer) -> socket.socket:
        try:
            address = (peer.host, peer.port)
            made = socket.create_connection(address, _left(self._deadline))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if (context := peer.encryption()) is None:
                return made
            try:
                made.settimeout(_left(self._deadline))
                return context.wrap_socket(made, server_hostname=peer.host)
            except BaseException:
                made.close()
                raise
        except TimeoutError as error:
            raise _late_connection(error) from None

    def _receive(self) -> bytes:
        self._socket.settimeout(_left(self._deadline))
        try:
            data = self._socket.recv(_PIECE)
        except TimeoutError:
            raise
        except OSError as error:
            raise BrokenAnswerError(*error.args) from None
        self._deadline.started = True
        if data:
            return self._reader.feed(data)
        self._reader.end()
        return b""

    def _pieces(self) -> Generator[bytes, None, None]:
        if self._first:
            yield self._first
            self._first = b""
        while not self._reader.is_complete:
            if piece := self._receive():
                yield piece


class _Connection(asyncio.Protocol):
    """A connection of asyncio, on which one answer at a time arrives."""

    def __init__(self) -> None:
        self.is_open = True
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._arrived: list[bytes] = []
        self._size = 0
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._arrived.append(data)
        self._size += len(data)
        if self._size > _MOST_WAITING and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self.is_open = False
        self._wake()

    def is_usable(self) -> bool:
        """Return whether a request may be sent: nothing came that nobody has asked for."""
        return self.is_open and not self._arrived

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    async def receive(self, seconds: float | None) -> bytes:
        """Return what has arrived, or nothing when the connection has ended."""
        if not self._arrived and self.is_open:
            await self._wait(seconds)
        return self.take()

    def take(self) -> bytes:
        data = self._arrived[0] if len(self._arrived) == 1 else b"".join(self._arrived)
        self._arrived.clear()
        self._size = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def _wait(self, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiting = waiting = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, _end_late, waiting)
        try:
            await waiting
        finally:
            self._waiting = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class AsyncOpenAIAnswer:
    """An answer that a task reads; closing it before its end cancels the request."""

    def __init__(
        self, connection: _Connection, deadline: Deadline, keep: Callable[[_Connection], None]
    ) -> None:
        self._connection = connection
        self._deadline = deadline
        self._keep = keep
        self._reader = AnswerReader()
        self._first = b""
        self._is_closed = False

    @property
    def status(self) -> int:
        return self._reader.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._reader.headers

    @property
    def has_begun(self) -> bool:
        return self._reader.has_begun

    async def begin(self, data: bytes) -> None:
        """Send the request, and read the head of the answer."""
        self._connection.send(data)
        while not self._reader.status:
            self._first = await self._receive()

    async def read(self) -> bytes:
        body = BodyReader()
        while piece := await self.next_piece():
            body.feed(piece)
        return body.end()

    def lines(self) -> AsyncLines:
        """Return the lines of a stream, each when it is whole."""
        return AsyncLines(self)

    async def next_piece(self) -> bytes:
        """Return what comes next of the body; at its end, nothing."""
        piece, self._first = self._first, b""
        while not piece and not self._reader.is_complete:
            piece = await self._receive()
        return piece

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if data := self._connection.take():
            # Streams say that they are over before they are.
            with suppress(BrokenAnswerError):
                self._reader.feed(data)
        if self._reader.is_complete and self._reader.keeps_connection:
            self._keep(self._connection)
        else:
            self._connection.abort()

    async def _receive(self) -> bytes:
        data = await self._connection.receive(_left(self._deadline))
        self._deadline.started = True
        if data:
            return self._reader.feed(data)
        self._reader.end()
        return b""


class AsyncLines:
    """The lines of an answer: no generator, which an event loop has to end if it is left."""

    def __init__(self, answer: AsyncOpenAIAnswer) -> None:
        self._answer = answer
        self._reader = LineReader()
        self._lines: deque[bytes] = deque()
        self._is_over = False

    def __aiter__(self) -> AsyncLines:
        return self

    async def __anext__(self) -> bytes:
        while not self._lines:
            if self._is_over:
                raise StopAsyncIteration
            if piece := await self._answer.next_piece():
                self._lines.extend(self._reader.feed(piece))
            else:
                self._is_over = True
                self._lines.extend(self._reader.end())
        return self._lines.popleft()


class OpenAISession:
    """The requests to one server from one event loop; their connections are used again."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._encryption = peer.encryption()
        self._kept: list[_Connection] = []
        self._addresses: list[str] = []
        """What the host's name stands for, as long as somebody answers there."""

    async def __aenter__(self) -> OpenAISession:
        return self

    async def __aexit__(self, *error: object) -> None:
        while self._kept:
            self._kept.pop().abort()

    async def open(self, request: OpenAIRequest, timeout: Timeout = None) -> AsyncOpenAIAnswer:
        """Send a request, and return its answer when the head of it has arrived."""
        data, deadline = request.encoded(), Deadline(timeout)
        if (kept := self._take()) is not None:
            began = time.monotonic()
            answer = AsyncOpenAIAnswer(kept, deadline, self._kept.append)
            try:
                return await _begun(answer, data)
            except BrokenAnswerError:
                # Servers close what is idle, and tell nobody in time.
                if answer.has_begun or time.monotonic() - began > _NOTICED_WITHIN:
                    raise
        connection = await self._connect(deadline)
        return await _begun(AsyncOpenAIAnswer(connection, deadline, self._kept.append), data)

    def _take(self) -> _Connection | None:
        while self._kept:
            if (connection := self._kept.pop()).is_usable():
                return connection
            connection.abort()
        return None

    async def _connect(self, deadline: Deadline) -> _Connection:
        making = asyncio.ensure_future(self._connect_to_any())
        try:
            # Not wait_for: before Python 3.12, it may lose a cancellation.
            await asyncio.wait([making], timeout=_left(deadline))
            if not making.done():
                raise TimeoutError
            return making.result()
        except TimeoutError as error:
            _give_up(making)
            self._addresses = []
            raise _late_connection(error) from None
        except asyncio.CancelledError:
            _give_up(making)
            raise

    async def _connect_to_any(self) -> _Connection:
        loop, peer = asyncio.get_running_loop(), self._peer
        if not self._addresses:
            found = await loop.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM)
            self._addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        name = peer.host if self._encryption else None
        failure: OSError | None = None
        for address in self._addresses:
            try:
                _, connection = await loop.create_connection(
                    _Connection, address, peer.port, ssl=self._encryption, server_hostname=name
                )
            except OSError as error:
                failure = failure or error
            else:
                return connection
        self._addresses = []
        raise failure or OSError("the address stands for no machine")


def _give_up(making: asyncio.Task[_Connection]) -> None:
    """Leave a connection that is being made, or has just been."""

    def abort(made: asyncio.Task[_Connection]) -> None:
        if not (made.cancelled() or made.exception()):
            made.result().abort()

    making.cancel()
    making.add_done_callback(abort)


async def _begun(answer: AsyncOpenAIAnswer, data: bytes) -> AsyncOpenAIAnswer:
    try:
        await answer.begin(data)
    except BaseException:
        answer.close()
        raise
    return answer


def _left(deadline: Deadline) -> float | None:
    """Return the seconds until the next bytes must have come."""
    seconds = deadline.next()
    if seconds is not None and seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


def _end_late(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_exception(TimeoutError("timed out"))


def _late_connection(error: BaseException) -> ConnectionError:
    """Return the error for a server that is not there: no answer that takes too long."""
    number = getattr(error, "errno", None)
    late = ConnectionError(str(error) or "no connection was made in time")
    late.errno = number
    return late
