"""What is asked beside users' requests for a release, and never in their way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context

from llmserve_gateway.admission import Admission

log = logging.getLogger("llmserve.gateway")

_MOST = 8
"""How many requests may wait to be compared: each is kept with its answer."""
_AT_ONCE = 1
_END_SECONDS = 5.0


class Background:
    """A short queue, whose work is left as soon as a user waits for a slot."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._reserved = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._is_closed = False

    def reserve(self) -> bool:
        """Take a place, if there is one.

        It is taken before an answer is known: what fails must not be seen more or less often.
        """
        busy = self._admission.waiting or self._admission.draining
        if self._is_closed or busy or self._reserved >= _MOST:
            return False
        self._reserved += 1
        return True

    def give_back(self) -> None:
        self._reserved -= 1

    def start(self, work: Callable[[], Awaitable[None]], on_drop: Callable[[], None]) -> None:
        """Do something in the place that was taken, and give that back."""

        async def do() -> None:
            async with self._turn:
                await work()

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._reserved -= 1
            if task.cancelled():
                on_drop()
            elif (error := task.exception()) is not None:
                log.error("a release could not be compared", exc_info=error)

        # It is no part of the request, and so not of its trace.
        task = Context().run(asyncio.get_running_loop().create_task, do())
        self._tasks.add(task)
        task.add_done_callback(end)

    def make_room(self) -> None:
        """Leave everything if a user waits for a slot."""
        if self._admission.waiting:
            for task in self._tasks:
                task.cancel()

    async def wait(self) -> None:
        """Wait until all that was begun has ended, for tests."""
        while self._tasks:
            await asyncio.wait([*self._tasks])

    async def close(self) -> None:
        self._is_closed = True
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_SECONDS)
