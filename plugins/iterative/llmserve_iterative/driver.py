"""In-flight batching on Triton's iterative scheduling.

Triton hands over all requests that are under way, those that have just come among them; the
engine makes steps for all of them for a while, which is a turn; what is new is sent; and each
request that is not done is given back to be scheduled again. Between two turns others can join.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from llmserve.runtime import Generation, Job, Parts, Responder
from llmserve.runtime.job import begin
from llmserve.runtime.steps import StepDriver

# However calm it is, a new request waits no longer than that for its turn. To be given back and
# to come again costs a request about a twentieth of a millisecond at least, and 0.2 of them where
# there are many: a turn is 20 times as long, the latter when nobody has come for a while.
_LONGEST_TURN = 0.1
_SHORTEST_TURN_OF_EACH = 0.0012
_LONGEST_TURN_OF_EACH = 0.0044

_ABANDONED = 60.0
# After so long a pause nothing was waiting: what comes then has just been sent.
_PAUSE = 0.05
# When Triton has had nothing for so long, none of those under way is with it any more. Where it
# was only slow, what comes again is begun anew, which costs a prefill and nothing else.
_SILENCE = 0.3
# Triton ends a sequence that it has not seen for the idle time, and then loses a request of it
# that is given back: nobody would ever answer it. One that comes near is kept to its end.
_NEAR = 0.8
# Triton numbers sequences itself, upwards; a number that far away is a client's own.
_OWN_NUMBERS = 1 << 16
_END_FLAG = 2


@dataclass
class ActiveRequest:
    """A request from its arrival to its last response.

    ``queued`` is when it went into Triton's queue for the last time, or a little earlier. A
    ``suspended`` one holds nothing in the engine: Triton seems to have let its request go.
    """

    job: Job
    queued: float
    next_piece: float = 0.0
    suspended: bool = False


class IterativeDriver(StepDriver):
    """Answers Triton's rescheduled requests through a generator of the mode ``"step"``."""

    def __init__(
        self, settings: Mapping[str, Any], _: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._shortest_turn = settings["burst_ms"] / 1000
        self._patience = _NEAR * settings["idle_seconds"]
        self._active: dict[int, ActiveRequest] = {}
        self._latest_number = 0
        self._turns_alone = 0
        # Triton's queue is first in, first out: whatever went into it before one that has come
        # must have come as well. What was queued before this moment has.
        self._reached = self._turn_ended = self._clock()
        self._lock = Lock()
        self._unloaded = Event()
        self._watcher = Thread(target=self._watch, name="llmserve watcher", daemon=True)

    def start(self, parts: Parts) -> None:
        self._set_up(parts, self._clock())
        self._watcher.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Take in what came, make steps for a turn, and give back what is not done."""
        with self._lock:
            self._execute(requests)

    def finalize(self) -> None:
        """Forget what is under way; the model is being unloaded."""
        self._unloaded.set()
        self._watcher.join()
        for request in self._active.values():
            self._drop(request.job)
        self._active.clear()
        self._metrics.close()

    def _execute(self, requests: Sequence[Any]) -> None:
        now = self._clock()
        controls = [_read_controls(raw) for raw in requests]
        known = [self._active[number].queued for number, _ in controls if number in self._active]
        if now - self._turn_ended > _PAUSE:
            self._reached = now - _PAUSE
        self._reached = max([self._reached, *known])
        self._turns_alone = 0 if any(start for _, start in controls) else self._turns_alone + 1
        present = {}
        for raw, (number, start) in zip(requests, controls, strict=True):
            if self._arrive(raw, number, start, now):
                present[number] = raw
        absent = [one for number, one in self._active.items() if number not in present]
        self._suspend([one for one in absent if one.queued < self._reached], now)
        self._step([self._active[number] for number in present], now)
        now = self._clock()
        for number, raw in present.items():
            request = self._active[number]
            if not (closed := request.job.responder.closed):
                # Who has left is given back unanswered as well: then Triton lets go of it and of
                # its sequence's place at once, and otherwise only after the idle time.
                raw.set_release_flags(self._parts.pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            if closed or self._left(request, now=True):
                self._drop(request.job)
                del self._active[number]
            else:
                request.queued = now
            request.job.responder.detach()
        self._turn_ended = now
        self._metrics.publish(now, at_once=not self._active)

    def _arrive(self, raw: Any, number: int, start: bool, now: float) -> bool:
        """Match a request with what is known of it, or begin it; say whether it goes on."""
        if start:
            return self._begin(raw, number, now)
        request = self._active.get(number)
        if request is None:
            Responder(raw, self._parts).refuse("this request was given up: send it again")
            return False
        request.job.responder.attach(raw)
        if not self._left(request) and request.suspended:
            self._admit(request.job)
        request.suspended = False
        return True

    def _begin(self, raw: Any, number: int, now: float) -> bool:
        if not self._numbered_by_triton(raw, number):
            message = "this model numbers requests by itself: send it without a sequence id"
            Responder(raw, self._parts).refuse(message)
            return False
        for job in begin([raw], self._parts, eager=False):
            if self._admit(job):
                self._active[number] = ActiveRequest(job, queued=self._reached)
                self._metrics.began(job, now)
                return True
        return False

    def _numbered_by_triton(self, raw: Any, number: int) -> bool:
        """Whether a sequence's number is not a client's own, which would mix two requests up."""
        if isinstance(raw.correlation_id(), str) or raw.flags() & _END_FLAG:
            return False
        if number - self._latest_number >= _OWN_NUMBERS or number in self._active:
            return False
        self._latest_number = max(self._latest_number, number)
        return True

    def _left(self, request: ActiveRequest, *, now: bool = False) -> bool:
        """Whether the client has gone; then nothing of its request is left."""
        if gone := request.job.responder.cancelled(now=now):
            self._cancel(request.job)
        return gone

    def _step(self, active: Sequence[ActiveRequest], began: float) -> None:
        """Make steps until it is time to ask Triton for new requests.

        Those that Triton would lose are made to their end, however long that takes.
        """
        turn = self._turn_length(len(active))
        interval = self._interval(one.job for one in active) if turn else 0.0
        if began - self._reached > self._patience / 4:
            # Only who is given back and comes again shows how long the others have been waiting.
            turn = 0.0
        while self._engine.busy:
            computed = (one.job for one in self._active.values() if not one.suspended)
            for generation, why in self._make_step(computed):
                self._fail(generation, why)
            now = self._clock()
            self._send(active, now, interval)
            going = [one for one in active if one.job.responder.waits]
            late = any(now - one.queued > self._patience for one in going)
            if not going or (now - began >= turn and not late):
                break
        # What was away while others' steps made its last tokens comes with none to make.
        self._send(active, self._clock(), interval)

    def _turn_length(self, requests: int) -> float:
        """Return for how long to make steps before new requests can join.

        Turns are short while some come. When none has come, each is twice as long as the one
        before, until what giving back and taking in again costs is a small part of it.
        """
        if not self._shortest_turn:
            return 0.0
        least = max(self._shortest_turn, requests * _SHORTEST_TURN_OF_EACH)
        most = max(least, min(_LONGEST_TURN, requests * _LONGEST_TURN_OF_EACH))
        return float(min(most, least * 2 ** min(self._turns_alone, 8)))

    def _send(self, active: Iterable[ActiveRequest], now: float, interval: float) -> None:
        """Send what is new: the first piece and the end at once, the others at a steady pace."""
        for request in active:
            waits = request.job.responder.waits
            if waits and self._send_news(request.job, now, request.next_piece):
                request.next_piece = now + interval

    def _fail(self, generation: Generation, error: Exception) -> None:
        for job in (one.job for one in self._active.values() if generation in one.job.generations):
            if job.responder.attached:
                self._give_up(job, error)
            else:
                # Its request is with Triton now; it is told when it comes again.
                self._cancel(job)

    def _watch(self) -> None:
        """Free what nobody waits for when no request comes that would bring it to light."""
        while not self._unloaded.wait(_SILENCE / 3):
            with self._lock:
                now = self._clock()
                if self._active and now - self._turn_ended > _SILENCE:
                    self._suspend(self._active.values(), now)
                    self._metrics.publish(now, at_once=True)

    def _suspend(self, requests: Iterable[ActiveRequest], now: float) -> None:
        """Free what a request holds that Triton has let go, and forget it long afterwards.

        Should it come again after all, it goes on from where it was.
        """
        for request in requests:
            if not request.suspended:
                request.suspended = True
                self._drop(request.job)
        self._active = {
            number: request
            for number, request in self._active.items()
            if not (request.suspended and now - request.queued > _ABANDONED)
        }


def _read_controls(raw: Any) -> tuple[int, bool]:
    """Return the number that Triton gave a request's sequence, and whether it begins with it."""
    found = {tensor.name(): tensor for tensor in raw.inputs()}
    number, start = (int(found[name].as_numpy().reshape(-1)[0]) for name in ("CORRID", "START"))
    return number, bool(start)
