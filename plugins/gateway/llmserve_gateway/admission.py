"""How many requests may be under way and wait: the place is taken in the step that checks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from llmserve_gateway.errors import ApiError


@dataclass(frozen=True)
class Limits:
    """Bounds of one gateway.

    ``max_requests`` run at a time, ``max_queue`` wait for their turn, and the prompts of all
    of them together have at most ``max_queued_tokens`` tokens, counted roughly from their bytes.
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
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def place(self, tokens: int) -> AsyncIterator[None]:
        """Hold a place for a request with a prompt of about so many tokens."""
        self._refuse(tokens)
        self.tokens += tokens
        try:
            if self.running < self.limits.max_requests and not self._waiting:
                self.running += 1
            else:
                await self._turn()
            try:
                yield
            finally:
                self._leave()
        finally:
            self.tokens -= tokens

    def _refuse(self, tokens: int) -> None:
        if self.draining:
            raise ApiError(
                503, "the server is shutting down", code="draining", headers={"retry-after": "5"}
            )
        room = self.running < self.limits.max_requests and not self._waiting
        if not room and self.waiting >= self.limits.max_queue:
            raise _full(f"{self.running} requests are under way and {self.waiting} wait")
        under_way = self.running + self.waiting
        if under_way and self.tokens + tokens > self.limits.max_queued_tokens:
            raise _full(f"prompts of about {self.tokens} tokens are under way")

    async def _turn(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # The place had just been handed over.
            else:
                self._waiting.remove(turn)
            raise

    def _leave(self) -> None:
        """Hand the place to whoever has waited longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1


def _full(why: str) -> ApiError:
    return ApiError(
        429,
        f"too many requests: {why}; try again in a second",
        code="queue_full",
        headers={"retry-after": "1", "retry-after-ms": "1000"},
    )
