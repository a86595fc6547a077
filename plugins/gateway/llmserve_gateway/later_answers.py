"""Requests that nobody waits for: their clients are told that they are kept, and may read along."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from llmserve.client import CALL_HEADERS
from llmserve.errors import RequestRejectedError
from llmserve_gateway.answering import Answering, wait_until_left
from llmserve_gateway.background_responses import BackgroundResponses
from llmserve_gateway.dialects import Later, R
from llmserve_gateway.errors import ApiError, from_llmserve
from llmserve_gateway.kept_events import EventLog
from llmserve_gateway.outcomes import Outcomes
from llmserve_gateway.reply import Reply, RequestRecord, Send, send_nowhere
from llmserve_gateway.stored_responses import CANCELLED, INTERRUPTED, StoredResponses

_READS_WITHIN = 10.0
"""Seconds in which whoever reads along has to take what is new."""


class LaterAnswers:
    """Answers requests that are kept, each in a task of its own."""

    def __init__(self, kept: StoredResponses, outcomes: Outcomes) -> None:
        self._kept = kept
        self._background = BackgroundResponses(kept)
        self._outcomes = outcomes
        self._is_closing = False

    async def answer(
        self,
        client: Answering[R],
        request: R,
        later: Later,
        respond: Callable[[Answering[R]], Awaitable[None]],
        *,
        held: AbstractContextManager[None],
        limits: Mapping[str, str],
    ) -> None:
        """Tell a client that its request is kept, and have ``respond`` answer that later.

        ``held`` is what it takes until then; ``limits`` are headers that tell its key what is left.
        """
        headers, dialect = client.headers, client.dialect
        record = RequestRecord(client.reply.record.id, key=client.reply.record.key)
        events = EventLog(self._kept, later.stored) if request.stream else None
        reply = LaterReply(record, partial(self._background.fail, later.stored), headers, events)
        answering = Answering(
            client.key, headers, _receive_nothing, send_nowhere, reply, dialect, is_later=True
        )

        async def answer() -> None:
            # Its span is not within that of its client's request.
            CALL_HEADERS.set(())
            trace = self._outcomes.trace(headers, dialect.operation)
            if trace is not None:
                trace.set_request(request)
            if request.stream:
                await reply.open(client.send, limits, later.events)
            reply.error_event = dialect.failure_of(request, record)
            await self._outcomes.record(reply, trace, respond(answering))
            if not reply.has_ended:
                await reply.fail(INTERRUPTED if self._is_closing else CANCELLED)
            if events is not None:
                await events.close()

        answered = await self._background.begin(later.stored, held, answer)
        client.reply.record.outcome = "queued"
        if not request.stream:
            client.reply.headers = limits
            await client.reply.send_body(later.body)
            return
        client.reply.record.status = 200
        leaving = asyncio.ensure_future(wait_until_left(client.receive))
        try:
            await asyncio.wait({answered, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            reply.leave()

    def stop(self, id: str) -> None:
        """End the task of a response that is to be answered no longer, if it is here."""
        self._background.stop(id)

    async def close(self) -> None:
        """End all tasks; their responses have failed."""
        self._is_closing = True
        await self._background.close()


async def answer_when_there_is_room(
    answer: Callable[[], Awaitable[None]], record: RequestRecord, timeout: float | None
) -> None:
    """Have a model answer when there is room for it, however long others are before."""
    while True:
        try:
            await answer()
            return
        except (ApiError, RequestRejectedError) as error:
            said = error if isinstance(error, ApiError) else from_llmserve(error)
            if said.status != 429 or record.first_output is not None:
                raise
        seconds = float(said.headers.get("retry-after", 1))
        if timeout is not None and time.perf_counter() + seconds > record.arrived + timeout:
            raise ApiError(504, f"no slot was free for {timeout:g} s", code="timeout")
        await asyncio.sleep(seconds)


class LaterReply(Reply):
    """Says what becomes of a request that nobody waits for; a client may read along for a while."""

    def __init__(
        self,
        record: RequestRecord,
        fail: Callable[[ApiError], Awaitable[None]],
        headers: Mapping[str, str],
        events: EventLog | None = None,
    ) -> None:
        """``events`` keeps what is streamed."""
        super().__init__(self._pass_on, record, headers=headers)
        self._fail = fail
        self._events = events
        self._reader: Send = send_nowhere

    async def open(self, send: Send, headers: Mapping[str, str], events: bytes) -> None:
        """Have a client read along."""
        self._reader, self.headers = send, headers
        await self.start_stream(events)

    def leave(self) -> None:
        """Send no more to the client, which has gone."""
        self._reader = send_nowhere

    async def fail(self, error: ApiError) -> None:
        await self._fail(error)
        await super().fail(error)

    async def _pass_on(self, message: Any) -> None:
        if self._events is not None and (said := message.get("body")):
            self._events.add(said)
        if self._reader is send_nowhere:
            return
        try:
            await asyncio.wait_for(self._reader(message), _READS_WITHIN)
        except (OSError, asyncio.TimeoutError):
            self.leave()


async def _receive_nothing() -> Any:
    """Receive nothing of a client, as there is none."""
    await asyncio.get_running_loop().create_future()
