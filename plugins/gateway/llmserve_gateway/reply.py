"""One request on its way back: what is sent, and what the log tells of it."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from llmserve_gateway.errors import ApiError

Send = Callable[[Any], Awaitable[None]]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    # Proxies must not collect what comes piece by piece.
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON = (b"content-type", b"application/json")


def request_id(headers: Mapping[str, str]) -> str:
    """Return the id that a client gave its request, or a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


@dataclass
class Visit:
    """One request, as the log tells of it."""

    id: str
    arrived: float = field(default_factory=time.perf_counter)
    key: str = ""
    model: str = ""
    outcome: str = "refused"
    status: int = 0
    first: float | None = None
    admitted: float | None = None
    ended: float = 0.0
    streamed: bool = False
    read: int = 0
    written: int = 0
    reasons: dict[int, str] = field(default_factory=dict)
    """Why each answer ended."""

    def line(self) -> str:
        """Return the line of the log: figures and names, never the text."""

        def since(moment: float | None) -> float | None:
            return None if moment is None else round((moment - self.arrived) * 1000, 1)

        return json.dumps(
            {
                "id": self.id,
                "key": self.key,
                "model": self.model,
                "status": self.status,
                "outcome": self.outcome,
                "input_tokens": self.read,
                "output_tokens": self.written,
                "queue_ms": since(self.admitted),
                "first_ms": since(self.first),
                "total_ms": since(self.ended),
            }
        )


class Reply:
    """Sends an answer; an error in the middle of a stream becomes its last event."""

    def __init__(
        self,
        send: Send,
        visit: Visit,
        error_body: Callable[[ApiError], bytes] = ApiError.json,
    ) -> None:
        self._send = send
        self.visit = visit
        self._error_body = error_body
        self.error_event: Callable[[ApiError], bytes] = ApiError.event
        self._streams = False

    async def whole(self, body: bytes, status: int = 200, headers: Any = ()) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [_JSON, length, *headers])
        await self._send({"type": "http.response.body", "body": body})

    async def begin(self, events: bytes) -> None:
        await self._start(200, _EVENTS)
        self._streams = self.visit.streamed = True
        if events:
            await self.more(events)

    async def more(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events})

    async def fail(self, error: ApiError) -> None:
        self.visit.outcome = "refused" if error.status < 500 else "failed"
        with suppress(OSError):
            if self._streams:
                self.visit.status = error.status
                await self.end(self.error_event(error))
                return
            headers = [(k.encode(), v.encode("latin-1")) for k, v in error.headers.items()]
            await self.whole(self._error_body(error), error.status, headers)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.visit.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, (b"x-request-id", self.visit.id.encode())],
            }
        )
