"""Admission of requests: slots for those that run, and a queue for those that wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from llmserve.runtime.contract import LATE_AFTER
from llmserve_gateway.errors import ApiError, queue_full
from llmserve_gateway.turns import NOBODY, Party, Standing, Turns, Waiter

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


@dataclass(eq=False, kw_only=True)
class Claim(Waiter):
    """Slots that a request waits for, and whose share they are of."""

    slots: int
    parties: frozenset[Party]
    turn: asyncio.Future[None]


class Admission:
    """Admits requests in the order of :class:`Turns`, within the share of each party.

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
        self._turns: Turns[Claim] = Turns()
        self._turn_of_batches = asyncio.Lock()
        self._released = asyncio.Event()
        """Set when batches may have room again."""

    @property
    def waiting(self) -> int:
        return sum(claim.slots for claim in self._turns)

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
    def hold(self, model: str, tokens: int, *parties: Party) -> Iterator[None]:
        """Count what a request holds as long as it waits or runs; refuse what would be too much."""
        if self.draining:
            raise ApiError(
                503, "the server is shutting down", code="draining", headers={"retry-after": "5"}
            )
        most = self.limits.max_queued_tokens
        limits = [(self.tokens[model], most, "")]
        limits += [
            (self._tokens_of[model, party], party.share(most), f" {party.in_words}")
            for party in parties
        ]
        for in_flight, limit, whose in limits:
            if in_flight and in_flight + tokens > limit:
                what = f"prompts and images{whose} that count as {in_flight} tokens are in flight"
                # They leave as requests end, one after the other.
                too_many = (in_flight + tokens - limit) / in_flight
                raise queue_full(what, self._seconds * min(1.0, too_many))
        self.tokens[model] += tokens
        for party in parties:
            self._tokens_of[model, party] += tokens
        try:
            yield
        finally:
            self.tokens[model] -= tokens
            if not self.tokens[model]:
                del self.tokens[model]
            for party in parties:
                self._tokens_of[model, party] -= tokens
                if not self._tokens_of[model, party]:
                    del self._tokens_of[model, party]

    @asynccontextmanager
    async def admit(
        self,
        answers: int = 1,
        seconds: float | None = None,
        parties: Iterable[Party] = (),
        *,
        standing: Standing = NOBODY,
        tokens: float = 0,
    ) -> AsyncIterator[Claim]:
        """Hold a slot for each answer to a request, which is refused without them after a while.

        ``tokens`` are those that it will use, as far as that is known. What it has used in the end
        is noted in what is yielded.
        """
        own, most = frozenset(parties), self.limits.max_requests
        # A request for more slots than there are waits until it can run alone.
        slots = min(answers, most, *(party.share(most) for party in own))
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        claim = Claim(
            standing, max(tokens, answers), loop.time(), slots=slots, parties=own, turn=turn
        )
        # No await may come between this check and taking the slots.
        self._check_queue(claim)
        with self.attend():
            self._turns.join(claim)
            self._assign()
            if not claim.turn.done():
                await self._wait_for(claim, seconds)
            began = loop.time()
            try:
                yield claim
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
            while self.beside and (self.beside + slots > most or self._turns):
                self._released.clear()
                await self._released.wait()
            self.beside += slots
        try:
            yield
        finally:
            self.beside -= slots
            self._assign()

    def _check_queue(self, claim: Claim) -> None:
        """Refuse a request if it has no turn now and too many wait."""
        self._turns.join(claim)
        try:
            # Batches are about to make room.
            if claim not in self._next(beside=0):
                self._check_waiting(claim)
        finally:
            # Batches leave slots to those that wait, which it may not have to.
            self._turns.leave(claim)

    def _check_waiting(self, claim: Claim) -> None:
        """Have room for a request in the queue, or refuse it.

        Others lose their places to it, if they have more than their weights say.
        """
        waiting = list(self._turns)
        leaving = loses_place(claim, waiting, self.limits.max_queue)
        if leaving is None:
            what = f"{self.running} requests are running and {_slots(waiting) - claim.slots} wait"
            raise queue_full(what, self._until_free(claim, self.running))
        for party in sorted(claim.parties):
            of_party = [each for each in waiting if party in each.parties and each not in leaving]
            more = loses_place(claim, of_party, party.share(self.limits.max_queue))
            if more is None:
                raise queue_full(
                    f"{self._running_of[party]} requests {party.in_words} are running and "
                    f"{_slots(of_party) - claim.slots} wait, which is its share",
                    self._until_free(claim, self._running_of[party]),
                )
            leaving += more
        for other in leaving:
            self._turns.leave(other)
            what = "the queue is full, and others have fewer places than their weights allow"
            other.turn.set_exception(queue_full(what, self._until_free(other, self.running)))

    def _until_free(self, claim: Claim, running: int) -> float:
        """Return after how many seconds so many running requests have left room in the queue."""
        return self._seconds * claim.slots / max(1, running)

    def _next(self, beside: int) -> list[Claim]:
        """Return who has a turn now: nobody overtakes who goes first, unless its share is taken."""
        found: list[Claim] = []
        running, most = self.running + beside, self.limits.max_requests
        running_of, full = Counter(self._running_of), set[Party]()

        def may(claim: Claim) -> bool:
            taken = {
                party
                for party in claim.parties
                if party in full or running_of[party] + claim.slots > party.share(most)
            }
            full.update(taken)
            return not taken

        for claim in self._turns.order(asyncio.get_running_loop().time(), may):
            if running + claim.slots > most:
                break
            found.append(claim)
            running += claim.slots
            for party in claim.parties:
                running_of[party] += claim.slots
        return found

    async def _wait_for(self, claim: Claim, seconds: float | None) -> None:
        loop, turn = asyncio.get_running_loop(), claim.turn
        if self.beside:
            self.on_arrival()
        timer = None if seconds is None else loop.call_later(seconds, _time_out, turn, seconds)
        try:
            await turn
        except (asyncio.CancelledError, ApiError):
            if turn.done() and not turn.cancelled() and not turn.exception():
                claim.used = 0
                self._release(claim)  # They had just been assigned.
            else:
                self._turns.leave(claim)  # _assign() may have done so already.
                self._assign()  # The next request in the queue may need fewer slots.
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _release(self, claim: Claim) -> None:
        self._turns.end(claim)
        self.running -= claim.slots
        for party in claim.parties:
            self._running_of[party] -= claim.slots
            if not self._running_of[party]:
                del self._running_of[party]
        self._assign()

    def _assign(self) -> None:
        """Assign free slots to the requests whose turn it is."""
        # Whose wait has ended is still there until it notices.
        for claim in [claim for claim in self._turns if claim.turn.done()]:
            self._turns.leave(claim)
        now = asyncio.get_running_loop().time()
        for claim in self._next(self.beside):
            self._turns.begin(claim, now)
            self.running += claim.slots
            for party in claim.parties:
                self._running_of[party] += claim.slots
            claim.turn.set_result(None)
        self._released.set()


def loses_place(claim: Claim, waiting: Iterable[Claim], most: int) -> list[Claim] | None:
    """Return who leaves a queue of ``most`` slots for a new request, which waits there already.

    None if that has to leave itself. The class below goes first; within a class the last request of
    the key that has the most slots by its weight, the new one counted. Who has waited for too long
    keeps its place.
    """
    now = claim.since
    left = [each for each in waiting if not each.turn.done()]
    over = _slots(left) - most
    leaving: list[Claim] = []
    while over > 0:
        may = [each for each in left if each is claim or now - each.since < LATE_AFTER]
        below = max(each.standing.priority for each in may)
        shares: Counter[str] = Counter()
        for each in left:
            if each.standing.priority == below:
                shares[each.standing.name] += each.slots
        found = [each for each in may if each.standing.priority == below]
        # Of equals, it is the new one; of one key, its last.
        last = max(
            enumerate(found),
            key=lambda item: (
                shares[item[1].standing.name] / item[1].standing.weight,
                item[1].standing.name == claim.standing.name,
                item[1] is claim,
                item[0],
            ),
        )[1]
        if last is claim:
            return None
        left.remove(last)
        leaving.append(last)
        over -= last.slots
    return leaving


def _slots(claims: Iterable[Claim]) -> int:
    return sum(claim.slots for claim in claims)


def _time_out(turn: asyncio.Future[None], seconds: float) -> None:
    if not turn.done():
        turn.set_exception(ApiError(504, f"no slot was free for {seconds:g} s", code="timeout"))
