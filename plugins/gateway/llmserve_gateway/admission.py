"""How many requests may be under way and wait: the place is taken in the step that checks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from llmserve_gateway.errors import ApiError


@dataclass(frozen=True)
class Limits:
    """Bounds of one gateway.

    ``max_requests`` run at a time, ``max_queue`` wait for their turn, and the prompts of all
    of them together have at most ``max_queued_tokens`` tokens, counted roughly from their bytes.
    A request for several answers counts as so many.
    """

    max_requests: int = 256
    max_queue: int = 256
    max_queued_tokens: int = 1_000_000


class Admission:
    """Lets requests in, first come, first served; all of it runs on one event loop."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running = 0
        self.tokens = 0
        self.draining = False
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def waiting(self) -> int:
        return sum(places for _, places in self._waiting)

    @asynccontextmanager
    async def place(
        self, tokens: int, answers: int = 1, seconds: float | None = None
    ) -> AsyncIterator[None]:
        """Hold a place for each answer to a request with about so many tokens to read.

        Who has none after so many ``seconds`` does not wait for one any longer.
        """
        # One that wants more than there is waits until it is alone.
        places = min(answers, self.limits.max_requests)
        self._refuse(tokens, places)
        self.tokens += tokens
        try:
            if self._fits(places) and not self._waiting:
                self.running += places
            else:
                await self._turn(places, seconds)
            try:
                yield
            finally:
                self._leave(places)
        finally:
            self.tokens -= tokens

    def _fits(self, places: int) -> bool:
        return self.running + places <= self.limits.max_requests

    def _refuse(self, tokens: int, places: int) -> None:
        if self.draining:
            raise ApiError(
                503, "the server is shutting down", code="draining", headers={"retry-after": "5"}
            )
        room = self._fits(places) and not self._waiting
        if not room and self.waiting + places > self.limits.max_queue:
            raise _full(f"{self.running} requests are under way and {self.waiting} wait")
        under_way = self.running + self.waiting
        if under_way and self.tokens + tokens > self.limits.max_queued_tokens:
            raise _full(f"prompts of about {self.tokens} tokens are under way")

    async def _turn(self, places: int, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append((turn, places))
        timer = None if seconds is None else loop.call_later(seconds, _too_late, turn, seconds)
        try:
            await turn
        except (asyncio.CancelledError, ApiError):
            if turn.done() and not turn.cancelled() and not turn.exception():
                self._leave(places)  # They had just been handed over.
            else:
                with suppress(ValueError):  # Somebody who left has passed it over already.
                    self._waiting.remove((turn, places))
                self._leave(0)  # Whoever waits behind it may need fewer.
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _leave(self, places: int) -> None:
        """Hand places to those who have waited longest."""
        self.running -= places
        while self._waiting and self._fits(self._waiting[0][1]):
            turn, wanted = self._waiting.popleft()
            if not turn.done():
                self.running += wanted
                turn.set_result(None)


def _too_late(turn: asyncio.Future[None], seconds: float) -> None:
    if not turn.done():
        turn.set_exception(ApiError(504, f"no place was free for {seconds:g} s", code="timeout"))


def _full(why: str) -> ApiError:
    return ApiError(
        429,
        f"too many requests: {why}; try again in a second",
        code="queue_full",
        headers={"retry-after": "1", "retry-after-ms": "1000"},
    )
