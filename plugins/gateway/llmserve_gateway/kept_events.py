"""Streams of responses that are answered in the background: kept, and read again from any event."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator

from llmserve_gateway.errors import ApiError
from llmserve_gateway.kept_items import StoreError
from llmserve_gateway.openai_answers import error_event, response_event
from llmserve_gateway.stored_responses import CANCELLED, StoredResponse, StoredResponses

log = logging.getLogger("llmserve.gateway")

_WRITES_EVERY, _READS_EVERY = 1.0, 0.5
_END_SECONDS = 3.0
"""How long the last event of a response that has ended is waited for."""
_COMMENTS_EVERY = 15.0
"""Seconds after which a reader of whom nothing is heard is sent a line, to see that it is there."""
_MOST_BYTES = 16 << 20
"""How much is kept of one stream."""
_MOST_READERS = 32
"""How many streams of a key are read at once."""
# Nothing that a user or a model says begins a line.
_NUMBER = re.compile(rb'^data: \{"type":"[a-z_.]+","sequence_number":([0-9]+)', re.MULTILINE)
_LAST = re.compile(rb"event: (?:error|response\.(?:completed|incomplete|failed))\n")


class EventLog:
    """Keeps the events of one stream, those of a second together."""

    def __init__(self, kept: StoredResponses, stored: StoredResponse) -> None:
        self._kept, self._stored = kept, stored
        self._new: list[bytes] = []
        self._size = 0
        self._writing: asyncio.Task[None] | None = None

    def add(self, events: bytes) -> None:
        """Keep events, unless it is a comment; what is too much ends what is kept."""
        if self._size > _MOST_BYTES or _NUMBER.search(events) is None:
            return
        self._size += len(events)
        self._new.append(events)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write_later())

    async def close(self) -> None:
        """Write what is left."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        await self._write()

    async def _write_later(self) -> None:
        while self._new:
            await asyncio.sleep(_WRITES_EVERY)
            await asyncio.shield(self._write())

    async def _write(self) -> None:
        events, self._new = b"".join(self._new), []
        if not events:
            return
        number = int(_NUMBER.findall(events)[-1])
        try:
            await self._kept.add_events(self._stored, number, events)
        except StoreError as error:
            # None that follows, so that there is no gap.
            self._size = _MOST_BYTES + 1
            self._new = []
            log.error("events of %s could not be kept: %s", self._stored.id, error.problem)


class EventReaders:
    """Those who read streams that are kept, or still go on."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def read(
        self, kept: StoredResponses, found: StoredResponse, after: int, timeout: float | None
    ) -> AsyncIterator[bytes]:
        """Return what comes after an event, up to the end of the response or of the time."""
        if self._count[found.owner] >= _MOST_READERS:
            what = f"this key reads {_MOST_READERS} streams already"
            raise ApiError(429, what, code="too_many_streams", headers={"retry-after": "5"})
        return self._read(kept, found, after, timeout)

    async def _read(
        self, kept: StoredResponses, found: StoredResponse, after: int, timeout: float | None
    ) -> AsyncIterator[bytes]:
        owner, began = found.owner, time.monotonic()
        self._count[owner] += 1
        try:
            ended, heard = None, began
            while timeout is None or time.monotonic() < began + timeout:
                # It is looked at before its events, of which the last may come after its end.
                found = await kept.find(owner, found.id)
                for number, event in _numbered(await kept.events(owner, found.id, after)):
                    if number > after:
                        after, heard = number, time.monotonic()
                        yield event
                        if _LAST.match(event):
                            return
                now = time.monotonic()
                if not found.is_unfinished:
                    ended = ended or now
                    if now > ended + _END_SECONDS:
                        yield _end_of(found, after + 1)
                        return
                if now > heard + _COMMENTS_EVERY:
                    heard = now
                    yield b": no event yet\n\n"
                await asyncio.sleep(_READS_EVERY)
        except ApiError as error:
            # It has been deleted, or cannot be read now.
            yield error_event(error, after + 1)
        finally:
            self._count[owner] -= 1


def _numbered(stretches: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    for stretch in stretches:
        for event in stretch.split(b"\n\n"):
            if (found := _NUMBER.search(event)) is not None:
                yield int(found[1]), event + b"\n\n"


def _end_of(found: StoredResponse, number: int) -> bytes:
    """Return the last event of a response of which none is kept."""
    if found.status == "cancelled":
        return error_event(CANCELLED, number)
    return response_event(f"response.{found.status}", number, response=found.response)
