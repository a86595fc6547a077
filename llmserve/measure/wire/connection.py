"""One unencrypted connection that speaks gRPC: frames in and out, and the calls on it."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from urllib.parse import unquote

import grpc

from llmserve.measure.wire import frames, hpack
from llmserve.measure.wire.direct import DirectSelector
from llmserve.measure.wire.message import LENGTH, NEVER, Call

_CODES = {code.value[0]: code.name for code in grpc.StatusCode}
_PIECE = struct.Struct(frames.HEAD.format + LENGTH.format[1:])
_REFILL = 2**30
_ROOM = 2**18
_SETTINGS = {
    # No table of headers to keep, no pushes, and as much at a time as there is.
    frames.HEADER_TABLE_SIZE: 0,
    frames.ENABLE_PUSH: 0,
    frames.INITIAL_WINDOW: frames.WIDEST,
    frames.MAX_FRAME: 2**24 - 1,
}
GREETING = (
    frames.PREFACE + frames.pack_settings(_SETTINGS) + frames.pack_window(0, frames.WIDEST - 65535)
)


class Connection(asyncio.BufferedProtocol):
    """One connection: what it reads goes to the calls, on the spot and without any task.

    It reads into a buffer of its own: asyncio's would be made anew for each read, and to ask the
    system for that much memory and give it back costs more than all the rest of a read.
    """

    def __init__(self) -> None:
        self.closed = False
        self._room = memoryview(bytearray(_ROOM))
        self._transport: asyncio.Transport | None = None
        self._selector: DirectSelector | None = None
        self._splitter = frames.Splitter()
        self._calls: dict[int, Call] = {}
        self._waiting: deque[tuple[Call, bytes]] = deque()
        self._blocked: dict[int, Call] = {}
        self._next = 1
        self._window = self._initial = 65535
        self._most_frame = 16384
        self._most_calls = frames.WIDEST
        self._taken = 0
        self._headers: tuple[int, int, bytes] | None = None
        self._reader = hpack.Reader()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the server."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        self._transport = transport
        transport.write(GREETING)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail what was under way."""
        self.closed = True
        self._let_go()
        reason = f"the connection was closed ({error})" if error else "the connection was closed"
        under_way = [*self._calls.values(), *(call for call, _ in self._waiting)]
        self._calls.clear()
        self._waiting.clear()
        for call in under_way:
            call.end("UNAVAILABLE", reason)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Say where to put what comes."""
        del sizehint
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        """Take what has come; it has come now."""
        self.take_in(nbytes)

    def take_in(self, nbytes: int) -> None:
        """Take what has come."""
        now = time.monotonic()
        at = self._note(nbytes, now)
        if at == nbytes:
            return
        try:
            for frame in self._splitter.feed(bytes(self._room[at:nbytes])):
                self._take(*frame, now)
        except Exception as error:
            self.connection_lost(error)
            self.close()

    def _note(self, nbytes: int, now: float) -> int:
        """Note messages that have a frame of their own, as nearly all that comes; say how far.

        Nothing else is done here: a load generator that takes dozens of streams does this for
        every piece of theirs, and little besides.
        """
        at, room, calls = 0, self._room, self._calls
        while nbytes - at >= _PIECE.size and not self._splitter.rest:
            high, low, kind, flags, stream, packed, length = _PIECE.unpack_from(room, at)
            size = high << 8 | low
            begin, end = at + _PIECE.size, at + frames.HEAD.size + size
            if kind != frames.DATA or flags or packed or begin + length != end or end > nbytes:
                break
            call = calls.get(stream)
            if call is None or call.partial:
                break
            call.arrivals.append((now, bytes(room[begin:end])))
            self._refill(size)
            at = end
        return at

    def read_by(self, selector: DirectSelector) -> None:
        """Be read by a selector instead of by the loop."""
        if self._transport is not None and not self.closed:
            self._selector = selector
            self._transport.pause_reading()
            selector.read(self._transport.get_extra_info("socket").fileno(), self)

    def hang_up(self) -> None:
        """Hear that the other side has closed."""
        if self._transport is not None:
            self._transport.abort()

    def resume(self) -> None:
        """Read on through the loop."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def start(self, call: Call, headers: bytes) -> None:
        """Begin a call, or let it wait where the server allows no more."""
        if self._timer is None or call.deadline < self._timer.when():
            self._watch(call.deadline)
        if len(self._calls) >= self._most_calls:
            self._waiting.append((call, headers))
            return
        call.stream, self._next = self._next, self._next + 2
        call.window = self._initial
        self._calls[call.stream] = call
        head = frames.pack(frames.HEADERS, frames.END_HEADERS, call.stream, headers)
        self._send(call, head)

    def _watch(self, deadline: float) -> None:
        """Come back when the first call has had its time: a timer for each would cost more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline < NEVER:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._end_what_is_late)

    def _end_what_is_late(self) -> None:
        self._timer = None
        now, first = time.monotonic(), NEVER
        late: list[Call] = []
        for call in [*self._calls.values(), *(call for call, _ in self._waiting)]:
            if call.deadline > now:
                first = min(first, call.deadline)
            elif not call.over:
                self.cancel(call)
                late.append(call)
        self._watch(first)
        for call in late:
            call.ended("DEADLINE_EXCEEDED", "")

    def cancel(self, call: Call) -> None:
        """Tell the server that nobody waits for a call any more."""
        call.over = True
        if self._calls.pop(call.stream, None) and not self.closed:
            self._write(frames.pack(frames.RST_STREAM, 0, call.stream, frames.CANCEL))
        self._blocked.pop(call.stream, None)
        self._start_waiting()

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self._let_go()
        if self._transport is not None:
            self._transport.close()

    def _let_go(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._selector is not None:
            self._selector.stop(self)

    def _send(self, call: Call, head: bytes = b"") -> None:
        parts = [head]
        while call.unsent:
            size = min(len(call.unsent), self._window, call.window, self._most_frame)
            if size <= 0:
                self._blocked[call.stream] = call
                break
            chunk, call.unsent = call.unsent[:size], call.unsent[size:]
            self._window -= size
            call.window -= size
            flags = 0 if call.unsent else frames.END_STREAM
            parts.append(frames.pack(frames.DATA, flags, call.stream, chunk))
        else:
            self._blocked.pop(call.stream, None)
        self._write(b"".join(parts))

    def _take(self, kind: int, flags: int, stream: int, payload: bytes, now: float) -> None:
        call = self._calls.get(stream)
        if kind == frames.DATA:
            self._refill(len(payload))
            if call is not None:
                call.take(now, payload)
                if flags & frames.END_STREAM:
                    self._finish(call)
        elif kind in (frames.HEADERS, frames.CONTINUATION):
            self._take_headers(kind, flags, stream, payload)
        elif kind == frames.RST_STREAM and call is not None:
            self._calls.pop(stream)
            call.end("UNAVAILABLE", "the server reset the stream")
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._settle(frames.unpack_settings(payload))
        elif kind == frames.PING and not flags & frames.ACK:
            self._write(frames.pack(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.WINDOW_UPDATE:
            self._widen(int.from_bytes(payload, "big"), stream, call)
        elif kind == frames.GOAWAY:
            # What is under way is finished; the next call opens another connection.
            self.closed = True

    def _take_headers(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == frames.HEADERS:
            self._headers = (stream, flags, payload)
        elif self._headers is not None:
            stream, flags, block = self._headers[0], self._headers[1] | flags, self._headers[2]
            self._headers = (stream, flags, block + payload)
        if self._headers is None or not flags & frames.END_HEADERS:
            return
        stream, flags, block = self._headers
        self._headers = None
        call = self._calls.get(stream)
        if call is not None:
            call.status.update(self._reader.read(block))
            if flags & frames.END_STREAM:
                self._finish(call)

    def _finish(self, call: Call) -> None:
        self._calls.pop(call.stream, None)
        self._blocked.pop(call.stream, None)
        status = call.status.get("grpc-status", "")
        code = _CODES.get(int(status), "UNKNOWN") if status.isdigit() else "UNKNOWN"
        self._start_waiting()
        call.end(code, unquote(call.status.get("grpc-message", "")))

    def _start_waiting(self) -> None:
        while self._waiting and len(self._calls) < self._most_calls and not self.closed:
            call, headers = self._waiting.popleft()
            if not call.over:
                self.start(call, headers)

    def _settle(self, settings: dict[int, int]) -> None:
        initial = settings.get(frames.INITIAL_WINDOW, self._initial)
        for call in self._calls.values():
            call.window += initial - self._initial
        self._initial = initial
        self._most_frame = settings.get(frames.MAX_FRAME, self._most_frame)
        self._most_calls = settings.get(frames.MAX_STREAMS, self._most_calls)
        self._write(frames.pack(frames.SETTINGS, frames.ACK, 0))
        self._unblock()

    def _widen(self, more: int, stream: int, call: Call | None) -> None:
        if stream == 0:
            self._window += more
        elif call is not None:
            call.window += more
        if self._blocked:
            self._unblock()

    def _unblock(self) -> None:
        for call in list(self._blocked.values()):
            self._send(call)

    def _refill(self, size: int) -> None:
        self._taken += size
        if self._taken >= _REFILL:
            self._write(frames.pack_window(0, self._taken))
            self._taken = 0

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
