"""The response to one request, and the record of it for the log, metrics and traces."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmserve_gateway.errors import ApiError
from llmserve_gateway.headers import is_anthropics

if TYPE_CHECKING:
    from llmserve.client import Completion
    from llmserve_gateway.inspector import Inspected
    from llmserve_gateway.sample import Sample

Send = Callable[[Any], Awaitable[None]]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Proxies must not buffer a stream.
_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_JSON = (b"content-type", b"application/json")


@dataclass(frozen=True)
class StreamFormat:
    """How an API sends an answer in pieces."""

    media_type: str
    parameters: str = ""
    has_comments: bool = False
    """Whether a stream may have lines that clients do not read."""


EVENTS = StreamFormat("text/event-stream", "; charset=utf-8", has_comments=True)
LINES = StreamFormat("application/x-ndjson")
"""An object in each line."""


def request_id(headers: Mapping[str, str]) -> str:
    """Return the id that the client gave its request, or a new one."""
    client_id = headers.get("x-request-id", "")
    return client_id if _REQUEST_ID.fullmatch(client_id) else secrets.token_hex(12)


def id_headers(headers: Mapping[str, str], number: str) -> list[tuple[bytes, bytes]]:
    """Return the headers in which the clients of a request's API look for its id."""
    names = (b"x-request-id", b"request-id") if is_anthropics(headers) else (b"x-request-id",)
    return [(name, number.encode()) for name in names]


@dataclass
class RequestRecord:
    """Facts about one request for the log, metrics and traces."""

    id: str
    arrived: float = field(default_factory=time.perf_counter)
    key: str = ""
    model: str = ""
    adapter: str = ""
    """The adapter that has answered, or has answered others: no word that only the client knows."""
    outcome: str = "refused"
    status: int = 0
    first_output: float | None = None
    loaded: float | None = None
    """When its model was loaded, if that had to be waited for."""
    admitted: float | None = None
    ended: float = 0.0
    streamed: bool = False
    input_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: dict[int, str] = field(default_factory=dict)

    def log_line(self) -> str:
        """Return the log line, which has numbers and names, but never any text."""
        return json.dumps(self._numbers())

    def facts(self) -> dict[str, Any]:
        """Return what the log has, and how it was answered."""
        reasons = [*self.finish_reasons.values()]
        return {**self._numbers(), "streamed": self.streamed, "finish_reasons": reasons}

    def _numbers(self) -> dict[str, Any]:
        def elapsed_ms(moment: float | None) -> float | None:
            return None if moment is None else round((moment - self.arrived) * 1000, 1)

        return {
            "id": self.id,
            "key": self.key,
            "model": self.model,
            **({"adapter": self.adapter} if self.adapter else {}),
            "status": self.status,
            "outcome": self.outcome,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            **({"load_ms": elapsed_ms(self.loaded)} if self.loaded else {}),
            "queue_ms": elapsed_ms(self.admitted),
            "first_ms": elapsed_ms(self.first_output),
            "total_ms": elapsed_ms(self.ended),
        }


class Reply:
    """Sends a response; an error within a stream becomes its last event."""

    def __init__(
        self,
        send: Send,
        record: RequestRecord,
        error_body: Callable[[ApiError], bytes] = ApiError.json,
        headers: Mapping[str, str] | None = None,
        streams_as: StreamFormat = EVENTS,
    ) -> None:
        self._send = send
        self.streams_as = streams_as
        self._ids = id_headers(headers or {}, record.id)
        self.record = record
        self._error_body = error_body
        self.error_event: Callable[[ApiError], bytes] = ApiError.event
        self.sent: Mapping[str, str] = {}
        """The fields that errors of the model are about, by their names in the tensor contract."""
        self.headers: Mapping[str, str] = {}
        """What every response to this request has besides."""
        self._streaming = False
        self.answers: list[Completion] | None = None
        """What has been answered, if somebody wants to know it beside the client."""
        self.sample: Sample | None = None
        """What is noted of the answer for its model to judge, if it is drawn."""
        self.inspected: Inspected | None = None
        """What is noted of the request for who looks at it, if anybody does."""
        self.has_begun = False
        """Whether the client has been sent anything: then nobody else can answer instead."""
        self.has_ended = False
        """Whether the server has the last of it: a client that goes then has all that was made."""

    async def send_body(self, body: bytes, status: int = 200, headers: Any = ()) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [_JSON, length, *headers])
        await self._send_last(body)

    async def start_stream(self, events: bytes) -> None:
        if not self._streaming:
            format = f"{self.streams_as.media_type}{self.streams_as.parameters}"
            await self._start(200, [(b"content-type", format.encode()), *_STREAM_HEADERS])
            self._streaming = self.record.streamed = True
        if events:
            await self.send_events(events)

    async def send_comment(self, text: str) -> None:
        """Start a stream, or go on with it, with a line that clients do not read."""
        await self.start_stream(b": " + text.encode() + b"\n\n")

    async def send_events(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_stream(self, events: bytes) -> None:
        await self._send_last(events)

    async def _send_last(self, body: bytes) -> None:
        self.has_ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: ApiError) -> None:
        self.record.outcome = "refused" if error.status < 500 else "failed"
        if self.inspected is not None:
            self.inspected.error = error.message
        with suppress(OSError):
            if self._streaming:
                self.record.status = error.status
                await self.end_stream(self.error_event(error))
                return
            headers = [(k.encode(), v.encode("latin-1")) for k, v in error.headers.items()]
            await self.send_body(self._error_body(error), error.status, headers)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.record.status, self.has_begun = status, True
        more = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *more, *self._ids],
            }
        )


async def send_nowhere(message: Any) -> None:
    del message
