"""The model's side of shared streams: see :mod:`llmserve.contract.shared_stream`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from llmserve.contract.bounded_json import parse_json
from llmserve.contract.options import OPEN_SHARED_STREAM
from llmserve.contract.shared_stream import GREETING, SharedPiece, is_name, pack
from llmserve.contract.tensors import CACHED_TOKENS, TEXT_FORMAT_OUTPUTS, TEXT_OUTPUT
from llmserve.runtime.answer.generation import Generation
from llmserve.runtime.answer.outputs import format_answers
from llmserve.runtime.answer.responder import Responder
from llmserve.runtime.errors import RequestError, invalid_value, panics_as_errors
from llmserve.runtime.protocols import Answer, Parts

_MAX_STREAMS = 256
_IDLE = 1.0
"""Seconds after which a stream that no request needs is ended."""
_CHECK_INTERVAL = 0.2
_GATHERING = 0.002
"""Seconds in which the pieces of a step come together, if nobody says when a step ends."""


class _Waiting(NamedTuple):
    """A piece that has not been sent yet."""

    stream: OpenStream
    responder: Responder
    request: str
    row: int
    answer: Answer


class OpenStream:
    """One open stream."""

    def __init__(self, responder: Responder) -> None:
        self.responder = responder
        self.needed_at = time.monotonic()
        # Requests join in one thread, and another asks whether they wait.
        self._users: WeakSet[Responder] = WeakSet()
        self._lock = Lock()

    @property
    def is_open(self) -> bool:
        return self.responder.waits

    @property
    def is_needed(self) -> bool:
        with self._lock:
            users = list(self._users)
        return any(user.waits for user in users)

    def join(self, user: Responder) -> None:
        with self._lock:
            self._users.add(user)


class Preview:
    """The pieces of one request in a shared stream."""

    def __init__(
        self, streams: SharedStreams, stream: OpenStream, responder: Responder, request: str
    ) -> None:
        self._streams, self._stream = streams, stream
        self._responder, self._request = responder, request
        self._ended: set[int] = set()
        stream.join(responder)

    @property
    def is_open(self) -> bool:
        return self._stream.is_open

    def send(self, generations: Sequence[Generation]) -> None:
        """Add the new text; if that is the end, the whole answer is sent after it."""
        if self._responder.closed:
            return
        for row, generation in enumerate(generations):
            if row in self._ended or not (generation.done or generation.has_news):
                continue
            if generation.done:
                self._ended.add(row)
            answer = self._responder.answer(generation, whole=False)
            self._streams.add(_Waiting(self._stream, self._responder, self._request, row, answer))
        if all(generation.done for generation in generations):
            for generation in generations:
                generation.rewind()
            self._streams.then(self._responder.closing(generations))


class SharedStreams:
    """The open streams of a model's process, and what waits to be sent in them.

    A driver that ``flushes`` says when the pieces of a step are complete. Otherwise they are sent
    a moment after the first has come.
    """

    def __init__(self, parts: Parts) -> None:
        self.flushes = False
        self._parts = parts
        self._streams: dict[str, OpenStream] = {}
        self._waiting: list[_Waiting] = []
        self._ends: list[Callable[[], None]] = []
        self._lock, self._sending = Lock(), Lock()
        self._wake = Event()
        self._thread: Thread | None = None

    def others(self, requests: Sequence[Any]) -> list[Any]:
        """Open the streams that requests ask for, and return the other requests."""
        others = []
        for raw in requests:
            name = _opens(raw)
            if name is None:
                others.append(raw)
                continue
            responder = Responder(raw, self._parts)
            try:
                self._begin(name, responder)
            except RequestError as error:
                responder.fail(error)
        return others

    def preview(self, name: str, responder: Responder, request: str) -> Preview | None:
        """Return what shows the pieces of a request in a stream; None if it is not open here."""
        stream = self._streams.get(name)
        if stream is None or not stream.is_open:
            return None
        return Preview(self, stream, responder, request)

    def add(self, piece: _Waiting) -> None:
        with self._lock:
            self._waiting.append(piece)
        if not self.flushes:
            self._wake.set()

    def then(self, end: Callable[[], None]) -> None:
        """Call ``end`` once the pieces so far have been sent."""
        # Nobody may wait for ever for the end of an answer, whatever the driver does, and even if
        # the last stream has just ended.
        with self._lock:
            self._ends.append(end)
            self._start_thread()
        self._wake.set()

    def flush(self) -> bool:
        """Send what waits, one response per stream; return whether there was anything.

        What another thread is sending has been sent, too, when this returns: a driver may then
        return the requests to Triton.
        """
        with self._sending:
            with self._lock:
                waiting, self._waiting = self._waiting, []
                ends, self._ends = self._ends, []
            for stream, pieces in self._formatted(waiting).items():
                self._send(stream, pieces)
            for end in ends:
                # One that cannot even be told of its failure must not keep the others waiting.
                with suppress(Exception):
                    end()
        return bool(waiting or ends)

    def close(self) -> None:
        """End all streams; the model is being unloaded."""
        self.flush()
        with self._sending:
            for name in list(self._streams):
                self._end(name)
        self._wake.set()
        if (thread := self._thread) is not None:
            thread.join()

    def _begin(self, name: object, responder: Responder) -> None:
        if not isinstance(name, str) or not is_name(name):
            raise invalid_value(OPEN_SHARED_STREAM, "takes 32 hexadecimal digits")
        with self._sending:
            if name in self._streams:
                raise RequestError(
                    "this process has that stream already",
                    code="stream_exists",
                    param=OPEN_SHARED_STREAM,
                )
            if len(self._streams) >= _MAX_STREAMS:
                raise RequestError("too many shared streams are open", code="queue_full")
            stream = OpenStream(responder)
            self._send(stream, GREETING)
            self._streams[name] = stream
            with self._lock:
                self._start_thread()

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="llmserve streams", daemon=True)
            self._thread.start()

    def _send(self, stream: OpenStream, content: Iterable[SharedPiece] | dict[str, int]) -> None:
        values = np.array([pack(content)], dtype=np.object_)
        tensors = {TEXT_OUTPUT.name: values[:, None] if self._parts.batched else values}
        # If it cannot be sent, the stream is closed, and the requests' own responses have it all.
        with suppress(Exception):
            stream.responder.send_tensors(tensors, final=False)

    def _formatted(self, waiting: Sequence[_Waiting]) -> dict[OpenStream, list[SharedPiece]]:
        pieces: dict[OpenStream, list[SharedPiece]] = {}
        waiting = [item for item in waiting if item.stream.is_open]
        try:
            with panics_as_errors():
                rows = self._format(waiting)
        except Exception:
            # The formatter cannot format one of them. The others must not fail with it.
            rows = [row for item in waiting for row in self._format_alone(item)]
        for stream, piece in rows:
            pieces.setdefault(stream, []).append(piece)
        return pieces

    def _format_alone(self, item: _Waiting) -> list[tuple[OpenStream, SharedPiece]]:
        try:
            with panics_as_errors():
                return self._format([item])
        except Exception as error:
            with suppress(Exception):
                item.responder.fail(error)
            return []

    def _format(self, waiting: Sequence[_Waiting]) -> list[tuple[OpenStream, SharedPiece]]:
        if not waiting:
            return []
        tensors = format_answers([item.answer for item in waiting], self._parts)
        columns = [tensors[tensor.name].tolist() for tensor in TEXT_FORMAT_OUTPUTS]
        cached = tensors.get(CACHED_TOKENS.name)
        rows = []
        for at, (item, row) in enumerate(zip(waiting, zip(*columns, strict=True), strict=True)):
            text, reason, input_tokens, output_tokens = row
            found = None if cached is None or item.answer.cached_tokens is None else int(cached[at])
            piece = SharedPiece(
                item.request, item.row, text.decode(), reason.decode(), input_tokens,
                output_tokens, found,
            )  # fmt: skip
            rows.append((item.stream, piece))
        return rows

    def _run(self) -> None:
        """Send what no driver has flushed, and end streams that nobody needs."""
        checked_at = time.monotonic()
        while True:
            if self._wake.wait(_CHECK_INTERVAL):
                time.sleep(_GATHERING)
                self._wake.clear()
            self.flush()
            if (now := time.monotonic()) - checked_at < _CHECK_INTERVAL and self._streams:
                continue
            checked_at = now
            # Asking Triton takes time, in which drivers can send.
            over = [name for name, s in list(self._streams.items()) if self._is_over(s, now)]
            with self._sending:
                for name in over:
                    self._end(name)
                with self._lock:
                    if not (self._streams or self._waiting or self._ends):
                        self._thread = None
                        return

    def _is_over(self, stream: OpenStream, now: float) -> bool:
        if stream.is_needed:
            stream.needed_at = now
        idle = now - stream.needed_at > _IDLE
        return idle or stream.responder.cancelled(now=True) or not stream.is_open

    def _end(self, name: str) -> None:
        # Closing the model may have ended it meanwhile.
        if stream := self._streams.pop(name, None):
            with suppress(Exception):
                stream.responder.send_tensors({}, final=True)


def _opens(raw: Any) -> Any:
    """Return the name of the stream that a request opens, None if it opens none."""
    try:
        # Over HTTP, they may be no UTF-8; reading the request's options then fails that one alone.
        parameters: str = raw.parameters() or ""
        # Reading all parameters of every request twice would cost more than this.
        if OPEN_SHARED_STREAM not in parameters:
            return None
        return parse_json(parameters).get(OPEN_SHARED_STREAM)
    except (ValueError, RecursionError, AttributeError):
        return None
