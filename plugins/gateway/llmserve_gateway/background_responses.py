"""Responses that are answered while nobody waits: the tasks of one gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress

from llmserve_gateway.errors import ApiError
from llmserve_gateway.kept_items import StoreError
from llmserve_gateway.stored_responses import INTERRUPTED, StoredResponse, StoredResponses

log = logging.getLogger("llmserve.gateway")

_PERIOD = 2.0
"""Seconds after which it is seen what others have cancelled, and what could not be written."""
_END_SECONDS = 5.0
_NOT_KEPT = ApiError(500, "its answer could not be kept: ask again", code="not_kept")


class BackgroundResponses:
    """Answers responses that are kept; what the store says of one is what is so."""

    def __init__(self, kept: StoredResponses) -> None:
        self._kept = kept
        self._running: dict[str, tuple[StoredResponse, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsaid: dict[str, tuple[StoredResponse, ApiError]] = {}
        """Those that have failed, which could not be kept, as a disk was full."""
        self._watching: asyncio.Task[None] | None = None

    async def begin(
        self,
        stored: StoredResponse,
        held: AbstractContextManager[None],
        answer: Callable[[], Awaitable[None]],
    ) -> asyncio.Task[None]:
        """Keep a response, and return the task that answers it; ``held`` is what it takes."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Who asks may leave at any moment: what is kept has its task all the same.
        task = asyncio.ensure_future(self._run(stored, held, answer, begun))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        begun.add_done_callback(lambda begun: begun.cancelled() or begun.exception())
        await asyncio.shield(begun)
        return task

    async def _run(
        self,
        stored: StoredResponse,
        held: AbstractContextManager[None],
        answer: Callable[[], Awaitable[None]],
        begun: asyncio.Future[None],
    ) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101
        try:
            with held:
                await self._kept.begin(stored)
                self._running[stored.id] = stored, task
                self._watch()
                begun.set_result(None)
                await answer()
                await self.fail(stored, _NOT_KEPT)
        except ApiError as error:
            if begun.done():
                raise
            begun.set_exception(error)
        finally:
            self._running.pop(stored.id, None)
            if not begun.done():
                begun.set_exception(INTERRUPTED)

    def stop(self, id: str) -> None:
        """End the task of a response that is to be answered no longer, if it is here."""
        if (running := self._running.get(id)) is not None:
            running[1].cancel()

    async def fail(self, stored: StoredResponse, error: ApiError) -> None:
        """Say that a response has failed, unless it has ended."""
        self._unsaid.pop(stored.id, None)
        try:
            await self._kept.update(stored.failed(error))
        except StoreError as error_of_store:
            log.error("that %s has failed could not be kept: %s", stored.id, error_of_store.problem)
            self._unsaid[stored.id] = stored, error

    async def close(self) -> None:
        """End all tasks; their responses have failed."""
        tasks = {*self._tasks, *([self._watching] if self._watching else [])}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_SECONDS)

    def _watch(self) -> None:
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._compare())

    async def _compare(self) -> None:
        """Have tasks and store say the same, for as long as there is anything to answer."""
        while self._running or self._unsaid:
            await asyncio.sleep(_PERIOD)
            for stored, error in [*self._unsaid.values()]:
                await self.fail(stored, error)
            before = {*self._running}
            with suppress(StoreError):
                await self._stop_what_is_over(before - await self._kept.unfinished())

    async def _stop_what_is_over(self, ids: set[str]) -> None:
        """Stop what another gateway has cancelled or removed, not what has been answered."""
        for id in ids:
            if (running := self._running.get(id)) is None:
                continue
            try:
                if (await self._kept.find(running[0].owner, id)).status != "cancelled":
                    continue
            except StoreError:
                continue
            except ApiError:
                pass  # It has been removed.
            self.stop(id)
