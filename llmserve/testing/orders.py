"""Loads and unloads models of a server that no ``serve`` supervises, in the way of ``serve``."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

from llmserve.errors import LLMServeError

if TYPE_CHECKING:
    from llmserve.server import Reconciler, Server, ServerSettings


class Orders:
    """What is ordered of a server: its reconciler carries that out, and looks at it only meanwhile.

    So whoever uses it sees a process that dies as dead, and no requests but its own.
    """

    @classmethod
    @contextmanager
    def start(cls, settings: ServerSettings) -> Iterator[Orders]:
        """Start a ``renewable`` server; the one that there is at the end of the block stops."""
        from llmserve.server import start

        orders = cls(settings, start(settings))
        try:
            yield orders
        finally:
            orders._close()
            orders.server.stop()

    def __init__(self, settings: ServerSettings, server: Server) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="orders", daemon=True)
        self._thread.start()
        self._pending = 0
        self._keeping: asyncio.Task[None] | None = None
        self._reconciler: Reconciler = self._begin(self._make(settings, server)).result()

    @property
    def server(self) -> Server:
        """The server; another one if that had to be restarted."""
        return self._reconciler.servers[0]

    def load(self, *names: str) -> None:
        """Load models, or load them again, one after the other; raise why one is not loaded."""
        for name in names:
            self._begin(self._order("reload", name)).result()

    def unload(self, *names: str) -> None:
        """Unload models, with the parts that no other model has."""
        for name in names:
            self._begin(self._order("unload", name)).result()

    def unload_later(self, *names: str) -> None:
        """Unload models before whatever is ordered next."""
        for name in names:
            self._begin(self._order("unload", name)).add_done_callback(_ignore)

    def _close(self) -> None:
        self._begin(self._end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _make(self, settings: ServerSettings, server: Server) -> Reconciler:
        from llmserve.server import Reconciler

        return Reconciler([settings], [server], lambda _: None, asks_for_tokens=False)

    async def _order(self, do: Literal["reload", "unload"], name: str) -> None:
        self._pending += 1
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep())
        try:
            await self._reconciler.order(do, name)
        finally:
            self._pending -= 1

    async def _end(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._reconciler.settle()

    async def _keep(self) -> None:
        while self._pending or self._reconciler.is_changing:
            self._reconciler.step()
            await self._reconciler.wait()


def _ignore(unload: Future[None]) -> None:
    # Whoever needs the model next is told.
    with suppress(LLMServeError):
        unload.result()
