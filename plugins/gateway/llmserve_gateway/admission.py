"""Admission of requests: slots for those that run, and a queue for those that wait."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

from llmserve_gateway.errors import ApiError, queue_full

_NEWEST = 0.1
"""The weight of the last request's time in the mean of all."""


@dataclass(frozen=True)
class Limits:
    """Limits of one gateway.

    ``max_requests`` run concurrently, ``max_queue`` wait for a slot, and the prompts to each model
    together have at most ``max_queued_tokens`` tokens, estimated from their bytes. What else of a
    request is in memory, such as images, counts as well.
    A request for N answers counts as N requests. Of several keys, none has more than half of the
    slots, of the queue and of what may be held for a model; of several models, none has more than
    three quarters of the slots and of the queue.

    ``batch_requests`` of batches run while nobody else asks, ``batch_beside`` beside others. They
    never have more than half of the slots.
    """

    max_requests: int = 256
    max_queue: int = 256
    max_queued_tokens: int = 1_000_000
    batch_requests: int = 32
    batch_beside: int = 1


class Party(NamedTuple):
    """One of several keys, or of several models, that have no more than a share each."""

    kind: Literal["key", "model"]
    name: str

    def share(self, of: int) -> int:
        """Return what it may have of so many: a key less than a model, which others use as well."""
        quarters = 2 if self.kind == "key" else 3
        return min(of, max(1, of * quarters // 4))


@dataclass(eq=False, frozen=True)
class _Claim:
    """Slots that a request waits for, and whose share they are of."""

    slots: int
    parties: frozenset[Party]
    turn: asyncio.Future[None]


class Admission:
    """Admits requests, first come, first served, within the share of each party.

    All of it runs on one event loop.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running = 0
        self.tokens: Counter[str] = Counter()
        """What each model's requests hold, which run or wait, in tokens."""
        self._tokens_of: Counter[tuple[str, Party]] = Counter()
        """What a party holds of that."""
        self._running_of: Counter[Party] = Counter()
        self.draining = False
        self.beside = 0
        """The slots of batches, which make room for all others."""
        self.on_arrival: Callable[[], None] = lambda: None
        """What makes that room."""
        self.idle_since: float | None = 0.0
        """When the last request ended that is not of a batch, if there is none now."""
        self._seconds = 0.0
        """How long requests run, the last ones more than those before."""
        self._attended = 0
        self._waiting: deque[_Claim] = deque()
        self._turn_of_batches = asyncio.Lock()
        self._released = asyncio.Event()
        """Set when batches may have room again."""

    @property
    def waiting(self) -> int:
        return sum(claim.slots for claim in self._waiting)

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
    def hold(self, model: str, tokens: int, party: Party | None = None) -> Iterator[None]:
        """Count what a request holds as long as it waits or runs; refuse what would be too much."""
        if self.draining:
            raise ApiError(
                503, "the server is shutting down", code="draining", headers={"retry-after": "5"}
            )
        most = self.limits.max_queued_tokens
        of_party = None if party is None else (model, party)
        limits = [(self.tokens[model], most, "")]
        if party and of_party:
            limits.append((self._tokens_of[of_party], party.share(most), f" of this {party.kind}"))
        for in_flight, limit, whose in limits:
            if in_flight and in_flight + tokens > limit:
                what = f"prompts and images{whose} that count as {in_flight} tokens are in flight"
                # They leave as requests end, one after the other.
                too_many = (in_flight + tokens - limit) / in_flight
                raise queue_full(what, self._seconds * min(1.0, too_many))
        self.tokens[model] += tokens
        if of_party:
            self._tokens_of[of_party] += tokens
        try:
            yield
        finally:
            self.tokens[model] -= tokens
            if not self.tokens[model]:
                del self.tokens[model]
            if of_party:
                self._tokens_of[of_party] -= tokens
                if not self._tokens_of[of_party]:
                    del self._tokens_of[of_party]

    @asynccontextmanager
    async def admit(
        self, answers: int = 1, seconds: float | None = None, parties: Iterable[Party] = ()
    ) -> AsyncIterator[None]:
        """Hold a slot for each answer to a request, which is refused without them after a while."""
        own, most = frozenset(parties), self.limits.max_requests
        # A request for more slots than there are waits until it can run alone.
        slots = min(answers, most, *(party.share(most) for party in own))
        claim = _Claim(slots, own, asyncio.get_running_loop().create_future())
        # No await may come between this check and taking the slots.
        self._check_queue(claim)
        with self.attend():
            self._waiting.append(claim)
            self._assign()
            if not claim.turn.done():
                await self._wait_for(claim, seconds)
            loop = asyncio.get_running_loop()
            began = loop.time()
            try:
                yield
            finally:
                ran = loop.time() - began
                self._seconds += (ran - self._seconds) * (_NEWEST if self._seconds else 1)
                self._release(claim)

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
            self._assign()

    def _check_queue(self, claim: _Claim) -> None:
        # Batches are about to make room.
        if claim in self._next([*self._waiting, claim], beside=0):
            return
        most = self.limits.max_queue
        if self.waiting + claim.slots > most:
            what = f"{self.running} requests are running and {self.waiting} wait"
            raise queue_full(what, self._until_free(claim, self.running))
        for party in sorted(claim.parties):
            waiting = sum(other.slots for other in self._waiting if party in other.parties)
            if waiting + claim.slots > party.share(most):
                raise queue_full(
                    f"{self._running_of[party]} requests of this {party.kind} are running and "
                    f"{waiting} wait, which is its share",
                    self._until_free(claim, self._running_of[party]),
                )

    def _until_free(self, claim: _Claim, running: int) -> float:
        """Return after how many seconds so many running requests have left room in the queue."""
        return self._seconds * claim.slots / max(1, running)

    def _next(self, claims: Iterable[_Claim], beside: int) -> list[_Claim]:
        """Return who has a turn now: no request overtakes another, but one whose share is taken."""
        found: list[_Claim] = []
        running, most = self.running + beside, self.limits.max_requests
        running_of, full = Counter(self._running_of), set[Party]()
        for claim in claims:
            taken = {
                party
                for party in claim.parties
                if party in full or running_of[party] + claim.slots > party.share(most)
            }
            full |= taken
            if taken:
                continue
            if running + claim.slots > most:
                break
            found.append(claim)
            running += claim.slots
            for party in claim.parties:
                running_of[party] += claim.slots
        return found

    async def _wait_for(self, claim: _Claim, seconds: float | None) -> None:
        loop, turn = asyncio.get_running_loop(), claim.turn
        if self.beside:
            self.on_arrival()
        timer = None if seconds is None else loop.call_later(seconds, _time_out, turn, seconds)
        try:
            await turn
        except (asyncio.CancelledError, ApiError):
            if turn.done() and not turn.cancelled() and not turn.exception():
                self._release(claim)  # They had just been assigned.
            else:
                with suppress(ValueError):  # _assign() may have removed it already.
                    self._waiting.remove(claim)
                self._assign()  # The next request in the queue may need fewer slots.
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _release(self, claim: _Claim) -> None:
        self.running -= claim.slots
        for party in claim.parties:
            self._running_of[party] -= claim.slots
            if not self._running_of[party]:
                del self._running_of[party]
        self._assign()

    def _assign(self) -> None:
        """Assign free slots to the requests that have waited longest."""
        # Whose wait has ended is still there until it notices.
        self._waiting = deque(claim for claim in self._waiting if not claim.turn.done())
        for claim in self._next(self._waiting, self.beside):
            self._waiting.remove(claim)
            self.running += claim.slots
            for party in claim.parties:
                self._running_of[party] += claim.slots
            claim.turn.set_result(None)
        self._released.set()


def _time_out(turn: asyncio.Future[None], seconds: float) -> None:
    if not turn.done():
        turn.set_exception(ApiError(504, f"no slot was free for {seconds:g} s", code="timeout"))
