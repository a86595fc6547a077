"""Has models loaded for the requests that name them, under a ``serve --on-demand``."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from llmserve.errors import ModelNotReadyError
from llmserve.server import Holds
from llmserve_gateway.errors import ApiError, queue_full
from llmserve_gateway.reply import Reply
from llmserve_gateway.turns import Party

_COMMENT_EVERY = 10.0
"""Seconds between comments in a stream that waits: proxies give up one that is silent for long."""
_LONGEST_NAME = 255
_NEWEST = 0.2
"""The weight of the last wait in the mean of all."""


class Loads:
    """Holds the models that requests use; at most ``limit`` requests wait for models at once.

    Those of one of several keys are at most half of that.
    ``on_wait`` is called when one begins to wait that is not of a batch, and ``observe`` with each
    model that was waited for, and the seconds.
    """

    def __init__(
        self,
        control: Path,
        limit: int,
        observe: Callable[[str, float], None],
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._holds = Holds(control)
        self._limit = limit
        self._observe = observe
        self._on_wait = on_wait
        self.waiting: Counter[str] = Counter()
        """How many requests wait for each model."""
        self.first = 0
        """How many of them are not of batches, which make room for them."""
        self._first_of: Counter[Party | None] = Counter()
        self._seconds = 0.0
        """How long requests wait, in the mean."""

    @asynccontextmanager
    async def hold(
        self,
        model: str,
        seconds: float | None = None,
        reply: Reply | None = None,
        *,
        comments: bool = False,
        of_batch: bool = False,
        load: bool = True,
        party: Party | None = None,
        priority: int = 0,
    ) -> AsyncIterator[bool]:
        """Keep a model loaded while the block runs, which is told whether it had to wait.

        Nothing is held if ``serve`` does not offer it. The request is refused if the model is not
        loaded within ``seconds``, or, without ``load``, now. Models for the class of a lower
        ``priority`` are loaded first. A ``reply`` that is a stream may have
        ``comments`` until then.
        """
        if len(model) > _LONGEST_NAME:
            # No folder has such a name; an order of serve is one line.
            yield False
            return
        async with AsyncExitStack() as stack:
            wait = _Wait(self, model, reply, party, comments=comments, of_batch=of_batch)
            with suppress(ModelNotReadyError):
                await wait.enter(
                    stack, partial(self._holds.hold, load=load, priority=priority), seconds
                )
            yield wait.is_counted

    @asynccontextmanager
    async def hold_if_loaded(self, model: str) -> AsyncIterator[None]:
        """Keep a model loaded while the block runs; raise ``NotLoadedError`` if it is not."""
        async with self._holds.hold(model, load=False):
            yield

    async def keep(self, model: str, seconds: float) -> None:
        """Say for how long a model is kept when nobody uses it, if it is loaded."""
        async with self._holds.hold(model, load=False, keep=seconds):
            pass

    def count(self, model: str, party: Party | None, *, of_batch: bool) -> None:
        """Count a request that waits, or refuse it."""
        if not of_batch:
            if self.first >= self._limit:
                what = f"{self.first} requests wait for models to be loaded"
                raise queue_full(what, self._seconds)
            if party and self._first_of[party] >= party.share(self._limit):
                what = f"{self._first_of[party]} requests of this {party.kind} wait for models"
                raise queue_full(f"{what} to be loaded, which is its share", self._seconds)
            self.first += 1
            self._first_of[party] += 1
            self._on_wait()
        self.waiting[model] += 1

    def uncount(self, model: str, party: Party | None, seconds: float, *, of_batch: bool) -> None:
        """Count one less, which has waited for so long."""
        self._observe(model, seconds)
        self._seconds += (seconds - self._seconds) * (_NEWEST if self._seconds else 1)
        if not of_batch:
            self.first -= 1
            self._first_of[party] -= 1
            if not self._first_of[party]:
                del self._first_of[party]
        self.waiting[model] -= 1
        if not self.waiting[model]:
            del self.waiting[model]


class _Wait:
    """The wait of one request until its model is loaded; it is none if that is loaded already."""

    def __init__(
        self,
        loads: Loads,
        model: str,
        reply: Reply | None,
        party: Party | None,
        *,
        comments: bool,
        of_batch: bool,
    ) -> None:
        self._loads = loads
        self._party = party
        self._of_batch = of_batch
        self._model = model
        self._reply = reply
        self._comments = comments
        self._began = time.perf_counter()
        self._place = 0
        self.is_counted = False
        """Whether the model was not loaded already."""
        self._refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()

    async def enter(
        self, stack: AsyncExitStack, hold: Callable[..., Any], seconds: float | None
    ) -> None:
        """Wait for the model, and hold it until the end of ``stack``."""
        held = hold(self._model, on_place=self._set_place)
        entering = asyncio.ensure_future(stack.enter_async_context(held))
        comments = asyncio.ensure_future(self._comment()) if self._comments else None
        try:
            events = {entering, self._refused}
            done, _ = await asyncio.wait(
                events, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                what = f"{self._model!r} was not loaded within {seconds:g} s"
                raise ApiError(504, what, code="timeout")
            await next(iter(done))
        finally:
            entering.cancel()
            self._refused.cancel()
            # Not cancelled, as it may be sending.
            self._over.set()
            await asyncio.gather(entering, *filter(None, [comments]), return_exceptions=True)
            if self.is_counted:
                waited = time.perf_counter() - self._began
                self._loads.uncount(self._model, self._party, waited, of_batch=self._of_batch)
                if self._reply is not None:
                    self._reply.record.loaded = time.perf_counter()

    def _set_place(self, place: int) -> None:
        self._place = place
        if not self.is_counted and not self._refused.done():
            try:
                self._loads.count(self._model, self._party, of_batch=self._of_batch)
                self.is_counted = True
            except ApiError as error:
                self._refused.set_exception(error)

    async def _comment(self) -> None:
        while self._reply is not None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), _COMMENT_EVERY)
                return
            await self._reply.send_comment(f"the model is loaded, {self._place} in the queue")
