"""The client's side of shared streams: see :mod:`llmserve.contract.shared_stream`.

A stream is opened with the first answer that is streamed, and again when the model has ended it.
Models with several processes get one in each: when a request is answered without the stream, its
process has none yet.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from typing import Any, Protocol

import grpc

from llmserve.client.exchange import FINAL_RESPONSE
from llmserve.client.messages import build_request, is_last, unpack_texts
from llmserve.client.model import ModelInfo
from llmserve.contract.failures import read
from llmserve.contract.options import OPEN_SHARED_STREAM
from llmserve.contract.shared_stream import SharedPiece, unpack
from llmserve.contract.tensors import TEXT_OUTPUT
from llmserve.errors import ClientError

_PATIENCE = 0.1
"""Seconds that the requests of the first moment wait for the stream to open."""
_PAUSE, _LONGEST_PAUSE = 0.05, 30.0
"""Seconds between two attempts to open one: the first, and the most."""


class Channel(Protocol):
    """What is needed of :class:`llmserve.client.aio.AsyncChannel`."""

    def stream(self, requests: list[Any], seconds: float | None) -> Any: ...
    async def read(self, stream: Any, seconds: float | None = None) -> Any: ...


class Inbox:
    """What has arrived for one call and has not been read; pieces of one answer join meanwhile.

    So a reader that is slow holds no other, and at most what it has asked for.
    """

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: Any) -> None:
        last = self._items[-1] if self._items else None
        if (
            isinstance(item, SharedPiece)
            and isinstance(last, SharedPiece)
            and (item.request, item.row) == (last.request, last.row)
        ):
            self._items[-1] = item._replace(text=last.text + item.text)
            return
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self, seconds: float | None) -> list[Any]:
        """Return all that has arrived, waiting until something has."""
        if not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            if seconds is None:
                await self._reader
            elif not (await asyncio.wait([self._reader], timeout=seconds))[0]:
                # Not wait_for: before Python 3.12, it may lose a cancellation.
                raise asyncio.TimeoutError
        items, self._items = self._items, []
        return items


class SharedStream:
    """The shared stream of a model: one call for each of its processes that has answered."""

    def __init__(self, channel: Channel, info: ModelInfo) -> None:
        self.name = secrets.token_hex(16)
        self._channel = channel
        self.info = info
        self._inboxes: dict[str, Inbox] = {}
        self._calls: set[asyncio.Future[None]] = set()
        self._open: set[asyncio.Future[None]] = set()
        self._opening: asyncio.Future[None] | None = None
        self._answered = asyncio.Event()
        self._tried_at = self._retry_at = 0.0
        self._pause = _PAUSE

    def close(self) -> list[asyncio.Future[None]]:
        """End the calls, and return what to wait for if the event loop is to end."""
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        return calls

    async def ready(self) -> bool:
        """Return whether the stream is open, having waited a moment for it to open."""
        if not self._open:
            self.extend()
            patience = self._tried_at + _PATIENCE - time.monotonic()
            if self._opening is not None and patience > 0:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._answered.wait(), patience)
        return bool(self._open)

    def extend(self) -> None:
        """Open the stream in a process that does not have it, unless that is being tried."""
        now = time.monotonic()
        if self._opening is None and now >= self._retry_at:
            self._tried_at = now
            self._answered.clear()
            # A separate context: what it says of the request that happens to be the first is
            # not true of all others.
            call = Context().run(asyncio.ensure_future, self._run())
            self._opening = call
            self._calls.add(call)
            call.add_done_callback(self._ended)

    @contextmanager
    def listening(self, requests: Iterable[str]) -> Iterator[Inbox]:
        inbox, ids = Inbox(), list(requests)
        self._inboxes.update(dict.fromkeys(ids, inbox))
        try:
            yield inbox
        finally:
            for request in ids:
                del self._inboxes[request]

    async def _run(self) -> None:
        # Triton's log and traces have the ids of requests, and must not have the name.
        number = str(secrets.randbits(63) or 1)
        options = {OPEN_SHARED_STREAM: self.name}
        request = build_request(self.info, [""], options, request_id=number)
        request.parameters[FINAL_RESPONSE].bool_param = True
        call = self._channel.stream([request], None)
        try:
            while message := await self._channel.read(call):
                if message.error_message:
                    self._refused(read(message.error_message).code)
                    return
                if is_last(message):
                    return
                for piece in _pieces(message.infer_response):
                    # Of other requests than ours we read nothing.
                    if inbox := self._inboxes.get(piece.request):
                        inbox.put(piece)
                if self._opening is asyncio.current_task():
                    self._opened()
        except (ClientError, ValueError):
            self._refused("bad_answer")
        except grpc.RpcError:
            # The requests themselves hear of it if the server has gone, and else go on alone.
            self._refused("unreachable")
        finally:
            call.cancel()

    def _opened(self) -> None:
        if self._opening is not None:
            self._open.add(self._opening)
        self._opening, self._pause = None, _PAUSE
        self._answered.set()

    def _refused(self, code: str) -> None:
        # A process that has the stream already may be the next to answer as well.
        may_succeed = code in ("unreachable", "stream_exists")
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if may_succeed else _LONGEST_PAUSE
        self._retry_at = time.monotonic() + self._pause

    def _ended(self, call: asyncio.Future[None]) -> None:
        self._calls.discard(call)
        self._open.discard(call)
        if self._opening is call:
            self._opening = None
            self._answered.set()
        if not call.cancelled():
            call.exception()


def _pieces(response: Any) -> list[SharedPiece]:
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        if output.name == TEXT_OUTPUT.name:
            return [piece for text in unpack_texts(raw) for piece in unpack(text)]
    return []
