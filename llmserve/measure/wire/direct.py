"""Reading a connection where the event loop waits, without a turn of the loop for what comes.

Most of what comes is only noted, or answered with the next request on the spot. Read by the
selector itself, it costs the wait, the read and the note. What has to be sent at a time is sent
from here as well. The loop has its turn where that has given it something to do, and for all else:
its own timers, other descriptors.
"""

from __future__ import annotations

import asyncio
import os
import select
import selectors
import socket
import time
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    _Args = TypeVarTuple("_Args")

Ready = list[tuple[selectors.SelectorKey, int]]
_NEVER = float("inf")
_UNSEEN = 4
"""Turns that the loop may have for what it has to do itself before it looks what has come."""


class Reads(Protocol):
    """What is read for."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """Say where to put what comes."""

    def take_in(self, nbytes: int) -> None:
        """Take what has come."""

    def hang_up(self) -> None:
        """Hear that the other side has closed."""

    def resume(self) -> None:
        """Read on through the loop, since another is read directly."""


class DirectLoop(asyncio.SelectorEventLoop):
    """An event loop whose selector reads one socket by itself."""

    def __init__(self) -> None:
        self.direct = DirectSelector()
        super().__init__(self.direct)

    def call_soon(
        self,
        callback: Callable[[Unpack[_Args]], object],
        *args: Unpack[_Args],
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Have something done with the next turn."""
        self.direct.stirred = True
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Args]], object],
        *args: Unpack[_Args],
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Have something done at a time, which may be before the selector would come back."""
        self.direct.stirred = True
        return super().call_at(when, callback, *args, context=context)


class DirectSelector(selectors.SelectSelector):
    """Waits, and reads one socket; its timers are finer than the millisecond of epoll's."""

    def __init__(self) -> None:
        super().__init__()
        self.stirred = False
        """Whether the loop has got something to do since this was last looked at."""
        self._socket: socket.socket | None = None
        self._reads: Reads | None = None
        self._waits: tuple[list[int], list[int]] | None = None
        self._unseen = 0
        self._due = _NEVER
        self._sound: Callable[[], None]

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Wait for something else as well."""
        self._waits = None
        return super().register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Wait for it no more."""
        self._waits = None
        return super().unregister(fileobj)

    def read(self, number: int, reads: Reads) -> None:
        """Read a socket from now on, by a descriptor of its own."""
        before = self._reads
        self.stop(before)
        if before is not None:
            before.resume()
        self._socket = socket.socket(fileno=os.dup(number))
        self._socket.setblocking(False)
        self._reads, self._waits = reads, None

    def stop(self, reads: Reads | None) -> None:
        """Read no more, if it is that what is read for."""
        if self._socket is not None and reads is self._reads:
            self._socket.close()
            self._socket = self._reads = self._waits = None

    def close(self) -> None:
        """Let go of all descriptors."""
        self.stop(self._reads)
        super().close()

    def alarm(self, when: float, sound: Callable[[], None]) -> None:
        """Have something done at a time where the loop waits; there is one alarm at a time."""
        self._due, self._sound = when, sound

    def select(self, timeout: float | None = None) -> Ready:
        """Wait as any selector does, but for what can be done on the spot."""
        if timeout is not None and timeout <= 0 and self._unseen < _UNSEEN:
            self._unseen += 1
            return []
        self._unseen = 0
        self.stirred = False
        now = time.monotonic()
        end = _NEVER if timeout is None else now + timeout
        while not self.stirred:
            first = end if end < self._due else self._due
            left = None if first == _NEVER else max(0.0, first - now)
            if self._socket is None or self._reads is None:
                ready = super().select(left)
            else:
                ready = self._read_on(self._socket, self._reads, left)
            now = time.monotonic()
            if now >= self._due:
                self._due = _NEVER
                self._sound()
            if ready or now >= end:
                return ready
        return []

    def _read_on(self, source: socket.socket, reads: Reads, left: float | None) -> Ready:
        """Read what comes until there is something for the loop, or the time is over."""
        own = [source.fileno()]
        readers, writers = self._waits = self._waits or self._all(own[0])
        end = _NEVER if left is None else time.monotonic() + left
        while True:
            try:
                ready, writable, _ = select.select(readers, writers, (), left)
            except InterruptedError:
                return []
            if ready != own or writable:
                # The loop's own, or time is up; if there is something of ours, it comes next.
                return super().select(0) if ready or writable else []
            self._take(source, reads)
            if self.stirred or self._socket is not source:
                return []
            if left is not None and (left := end - time.monotonic()) <= 0:
                return []

    def _all(self, own: int) -> tuple[list[int], list[int]]:
        """List what is waited for; it hardly ever changes."""
        keys = list(self.get_map().values())
        readers = [key.fd for key in keys if key.events & selectors.EVENT_READ]
        writers = [key.fd for key in keys if key.events & selectors.EVENT_WRITE]
        return [own, *readers], writers

    def _take(self, source: socket.socket, reads: Reads) -> None:
        buffer: Any = reads.get_buffer(-1)
        try:
            size = source.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size = 0
        if size:
            reads.take_in(size)
        else:
            self.stop(reads)
            reads.hang_up()
