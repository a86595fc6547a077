"""Admission of requests: slots for those that run, and a queue for those that wait."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmserve_gateway.errors import ApiError, bad_request, queue_full

if TYPE_CHECKING:
    from llmserve_gateway.catalog import Catalog
    from llmserve_gateway.fields import ParsedRequest
    from llmserve_gateway.value_requests import ValueRequest


@dataclass(frozen=True)
class Limits:
    """Limits of one gateway.

    ``max_requests`` run concurrently, ``max_queue`` wait for a slot, and the prompts to each model
    together have at most ``max_queued_tokens`` tokens, estimated from their bytes. What else of a
    request is in memory, such as images, counts as well.
    A request for N answers counts as N requests.

    ``batch_requests`` of batches run while nobody else asks, ``batch_beside`` beside others. They
    never have more than half of the slots.
    """

    max_requests: int = 256
    max_queue: int = 256
    max_queued_tokens: int = 1_000_000
    batch_requests: int = 32
    batch_beside: int = 1


class Admission:
    """Admits requests, first come, first served; all of it runs on one event loop."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running = 0
        self.tokens: Counter[str] = Counter()
        """What each model's requests hold, which run or wait, in tokens."""
        self.draining = False
        self.beside = 0
        """The slots of batches, which make room for all others."""
        self.on_arrival: Callable[[], None] = lambda: None
        """What makes that room."""
        self.idle_since: float | None = 0.0
        """When the last request ended that is not of a batch, if there is none now."""
        self._attended = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._turn_of_batches = asyncio.Lock()
        self._released = asyncio.Event()
        """Set when batches may have room again."""

    @property
    def waiting(self) -> int:
        return sum(slots for _, slots in self._waiting)

    @contextmanager
    def attend(self) -> Iterator[None]:
        """Have batches make room until a request that is not of one has ended."""
        self._attended += 1
        self.idle_since = None
        self.on_arrival()
        try:
            yield
        finally:
            self._attended -= 1
            if not self._attended:
                self.idle_since = asyncio.get_running_loop().time()

    @contextmanager
    def hold(self, model: str, tokens: int) -> Iterator[None]:
        """Count what a request holds as long as it waits or runs; refuse what would be too much."""
        if self.draining:
            raise ApiError(
                503, "the server is shutting down", code="draining", headers={"retry-after": "5"}
            )
        in_flight = self.tokens[model]
        if in_flight and in_flight + tokens > self.limits.max_queued_tokens:
            what = f"prompts and images that count as {in_flight} tokens are in flight"
            raise queue_full(what)
        self.tokens[model] += tokens
        try:
            yield
        finally:
            self.tokens[model] -= tokens
            if not self.tokens[model]:
                del self.tokens[model]

    @asynccontextmanager
    async def admit(self, answers: int = 1, seconds: float | None = None) -> AsyncIterator[None]:
        """Hold a slot for each answer to a request, which is refused without them after a while."""
        # A request for more slots than there are waits until it can run alone.
        slots = min(answers, self.limits.max_requests)
        # No await may come between this check and taking the slots.
        self._check_queue(slots)
        with self.attend():
            if self._fits(slots) and not self._waiting:
                self.running += slots
            else:
                await self._wait_for_slots(slots, seconds)
            try:
                yield
            finally:
                self._release(slots)

    @asynccontextmanager
    async def admit_beside(self, answers: int) -> AsyncIterator[None]:
        """Hold a slot of a batch for each answer: at most half of all, the others stay free."""
        most = max(1, self.limits.max_requests // 2)
        slots = min(answers, most)
        async with self._turn_of_batches:
            # Whoever waits for slots gets those of batches as they end, but for one of these.
            while self.beside and (self.beside + slots > most or self._waiting):
                self._released.clear()
                await self._released.wait()
            self.beside += slots
        try:
            yield
        finally:
            self.beside -= slots
            self._release(0)

    def _fits(self, slots: int) -> bool:
        return self.running + self.beside + slots <= self.limits.max_requests

    def _check_queue(self, slots: int) -> None:
        # Batches are about to make room.
        runs_now = self.running + slots <= self.limits.max_requests and not self._waiting
        if not runs_now and self.waiting + slots > self.limits.max_queue:
            raise queue_full(f"{self.running} requests are running and {self.waiting} wait")

    async def _wait_for_slots(self, slots: int, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append((turn, slots))
        if self.beside:
            self.on_arrival()
        timer = None if seconds is None else loop.call_later(seconds, _time_out, turn, seconds)
        try:
            await turn
        except (asyncio.CancelledError, ApiError):
            if turn.done() and not turn.cancelled() and not turn.exception():
                self._release(slots)  # They had just been assigned.
            else:
                with suppress(ValueError):  # _release() may have removed it already.
                    self._waiting.remove((turn, slots))
                self._release(0)  # The next request in the queue may need fewer slots.
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _release(self, slots: int) -> None:
        """Assign free slots to the requests that have waited longest."""
        self.running -= slots
        while self._waiting and self._fits(self._waiting[0][1]):
            turn, wanted = self._waiting.popleft()
            if not turn.done():
                self.running += wanted
                turn.set_result(None)
        self._released.set()


def _time_out(turn: asyncio.Future[None], seconds: float) -> None:
    if not turn.done():
        turn.set_exception(ApiError(504, f"no slot was free for {seconds:g} s", code="timeout"))


async def check_fits(request: ParsedRequest | ValueRequest, catalog: Catalog) -> None:
    """Refuse a prompt that cannot fit into its model, before it counts or the model reads it."""
    if request.cuts:
        return
    context = await catalog.context_length(request.model)
    longest = await catalog.longest_prompt(request.model)
    messages = request.options.get("messages") or ()
    for prompt in request.prompts:
        if isinstance(prompt, str):
            contents = [message.get("content") or "" for message in messages]
            parts = [p for c in contents if not isinstance(c, str) for p in c]
            texts = [c for c in contents if isinstance(c, str)] + [p.get("text", "") for p in parts]
            size = len(prompt) + sum(map(len, texts))
            limit, unit = longest, "characters"
        else:
            size, limit, unit = len(prompt), context, "tokens"
        if limit is not None and size > limit:
            raise bad_request(
                f"this model's maximum context length is {context} tokens, which the prompt's "
                f"{size} {unit} exceed: shorten it",
                "messages" if messages else request.sent.get("text_input", "prompt"),
                "context_length_exceeded",
            )
