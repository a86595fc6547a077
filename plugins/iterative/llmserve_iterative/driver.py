"""In-flight batching on Triton's iterative scheduling.

Triton passes all requests in flight, including those that have just arrived. The engine runs steps
for all of them for a while, which is a burst; new text is sent; and each unfinished request is
returned to Triton to be rescheduled. New requests can join between two bursts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from llmserve.runtime import Generation, Job, JobRunner, Parts, Responder, begin

# A new request never waits longer than this to join, even if none has arrived for a while. To
# return a request and receive it again takes at least about a twentieth of a millisecond, and 0.2
# with many requests. A burst lasts 20 times that; if none has arrived lately, the latter counts.
_LONGEST_BURST = 0.1
_SHORTEST_BURST_PER_REQUEST = 0.0012
_LONGEST_BURST_PER_REQUEST = 0.0044

_FORGET_AFTER = 60.0
# After a pause this long, no request was waiting: what arrives then has just been sent.
_PAUSE = 0.05
# If Triton passes nothing for this long, it no longer has any of the requests in flight. If it was
# only slow, a request that returns is admitted again, which costs a prefill and nothing else.
_SILENCE = 0.3
# Triton ends a sequence that it has not seen for the idle time, and then loses its request when
# that is returned: it would never be answered. A request this close to it runs to completion.
_IDLE_TIME_SHARE = 0.8
# Triton numbers sequences upwards; a number this far above the latest one is a client's own.
_CLIENT_ID_GAP = 1 << 16
# How often Triton gets requests back while none is in flight whose constraint is ready.
_PENDING_PAUSE = 0.002
_END_FLAG = 2


@dataclass
class ActiveRequest:
    """A request from its arrival to its last response.

    ``queued`` is when it last entered Triton's queue, or slightly earlier. A ``suspended`` request,
    which Triton seems to have dropped or whose constraint is not ready, holds nothing in the
    engine; neither does one with an error.
    """

    job: Job
    queued: float
    next_piece: float = 0.0
    suspended: bool = False
    error: Exception | None = None


class IterativeDriver:
    """Answers Triton's rescheduled requests with a generator of the mode ``"step"``."""

    def __init__(
        self, settings: Mapping[str, Any], _: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._shortest_burst = settings["burst_ms"] / 1000
        self._longest_hold = _IDLE_TIME_SHARE * settings["idle_seconds"]
        self._active: dict[int, ActiveRequest] = {}
        self._latest_number = 0
        self._quiet_bursts = 0
        # Triton's queue is first in, first out: when a request arrives, all that were queued before
        # it must have arrived as well. All requests queued before this time have.
        self._drained_until = self._burst_ended = self._clock()
        self._lock = Lock()
        self._unloaded = Event()
        self._watcher = Thread(target=self._watch, name="llmserve watcher", daemon=True)

    def start(self, parts: Parts) -> None:
        self._parts, self._runner = parts, JobRunner(parts, self._clock())
        self._watcher.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Accept requests, run steps for a burst, and return the unfinished ones to Triton."""
        with self._lock:
            self._execute(requests)

    def finalize(self) -> None:
        """Drop all requests in flight; the model is being unloaded."""
        self._unloaded.set()
        self._watcher.join()
        for request in self._active.values():
            self._runner.drop(request.job)
        self._active.clear()
        self._runner.close()

    def _execute(self, requests: Sequence[Any]) -> None:
        now = self._clock()
        controls = [_read_controls(raw) for raw in requests]
        queued = [self._active[number].queued for number, _ in controls if number in self._active]
        if now - self._burst_ended > _PAUSE:
            self._drained_until = now - _PAUSE
        self._drained_until = max([self._drained_until, *queued])
        self._quiet_bursts = 0 if any(start for _, start in controls) else self._quiet_bursts + 1
        present = {}
        for raw, (number, start) in zip(requests, controls, strict=True):
            if self._receive(raw, number, start, now):
                present[number] = raw
        absent = [request for number, request in self._active.items() if number not in present]
        self._suspend([request for request in absent if request.queued < self._drained_until], now)
        self._step([self._active[number] for number in present], now)
        if not self._runner.busy and any(self._active[number].job.pending for number in present):
            time.sleep(_PENDING_PAUSE)
        now = self._clock()
        for number, raw in present.items():
            request = self._active[number]
            if not (closed := request.job.responder.closed):
                # A request whose client disconnected is returned unanswered as well: Triton then
                # frees it and its sequence's slot at once, and otherwise only after the idle time.
                raw.set_release_flags(self._parts.pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            if closed or self._cancel_if_gone(request, now=True):
                self._runner.drop(request.job)
                del self._active[number]
            else:
                request.queued = now
            request.job.responder.detach()
        self._burst_ended = now
        self._runner.metrics.publish(now, at_once=not self._active)

    def _receive(self, raw: Any, number: int, start: bool, now: float) -> bool:
        """Begin a new request or continue a known one; return whether it was accepted."""
        if start:
            return self._begin(raw, number, now)
        request = self._active.get(number)
        if request is None:
            Responder(raw, self._parts).refuse("this request was dropped: send it again")
            return False
        request.job.responder.attach(raw)
        if request.error is not None:
            self._runner.give_up(request.job, request.error)
        elif not self._cancel_if_gone(request) and request.suspended:
            if request.job.pending:
                return True
            self._runner.admit(request.job)
        request.suspended = False
        return True

    def _begin(self, raw: Any, number: int, now: float) -> bool:
        if not self._numbered_by_triton(raw, number):
            message = "this model assigns sequence ids itself: send the request without one"
            Responder(raw, self._parts).refuse(message)
            return False
        for job in begin([raw], self._parts, eager=False):
            # The steps of the others do not wait until its constraint is compiled.
            pending = job.pending
            if pending or self._runner.admit(job):
                self._active[number] = ActiveRequest(
                    job, queued=self._drained_until, suspended=pending
                )
                self._runner.metrics.began(job, now)
                return True
        return False

    def _numbered_by_triton(self, raw: Any, number: int) -> bool:
        """Whether the number is not a client's own, which would mix up two requests."""
        if isinstance(raw.correlation_id(), str) or raw.flags() & _END_FLAG:
            return False
        if number - self._latest_number >= _CLIENT_ID_GAP or number in self._active:
            return False
        self._latest_number = max(self._latest_number, number)
        return True

    def _cancel_if_gone(self, request: ActiveRequest, *, now: bool = False) -> bool:
        """Cancel a request if its client has disconnected; return whether it has."""
        if gone := request.job.responder.cancelled(now=now):
            self._runner.cancel(request.job)
        return gone

    def _step(self, active: Sequence[ActiveRequest], began: float) -> None:
        """Run steps until it is time to ask Triton for new requests.

        Requests that Triton would lose run to completion, however long that takes.
        """
        burst = self._burst_length(len(active))
        interval = self._runner.interval(request.job for request in active) if burst else 0.0
        if began - self._drained_until > self._longest_hold / 4:
            # Only requests that are returned and come back show how long the others have waited.
            burst = 0.0
        while self._runner.busy:
            jobs = (request.job for request in self._active.values() if not request.suspended)
            for generation, error in self._runner.step(jobs):
                self._fail(generation, error)
            now = self._clock()
            self._send(active, now, interval)
            unfinished = [request for request in active if request.job.responder.waits]
            at_risk = any(now - request.queued > self._longest_hold for request in unfinished)
            if not unfinished or (now - began >= burst and not at_risk):
                break
        # A request may have got its last tokens in others' steps while Triton had it.
        self._send(active, self._clock(), interval)

    def _burst_length(self, requests: int) -> float:
        """Return how long to run steps before new requests can join.

        Bursts are short while requests arrive. If none has, each is twice as long as the one
        before, until returning and receiving requests takes only a small part of it.
        """
        if not self._shortest_burst:
            return 0.0
        shortest = max(self._shortest_burst, requests * _SHORTEST_BURST_PER_REQUEST)
        longest = max(shortest, min(_LONGEST_BURST, requests * _LONGEST_BURST_PER_REQUEST))
        return float(min(longest, shortest * 2 ** min(self._quiet_bursts, 8)))

    def _send(self, active: Iterable[ActiveRequest], now: float, interval: float) -> None:
        """Send new text: the first piece and the end at once, the others at a steady pace."""
        for request in active:
            waits = request.job.responder.waits
            if waits and self._runner.send_news(request.job, now, request.next_piece):
                request.next_piece = now + interval
        self._runner.flush(now)

    def _fail(self, generation: Generation, error: Exception) -> None:
        for request in self._active.values():
            if generation in request.job.generations:
                if request.job.responder.attached:
                    self._runner.give_up(request.job, error)
                else:
                    # Triton has its request now; it is answered when that comes back.
                    self._runner.drop(request.job)
                    request.error = error

    def _watch(self) -> None:
        """Free what disconnected clients hold if no request arrives that would reveal them."""
        while not self._unloaded.wait(_SILENCE / 3):
            with self._lock:
                now = self._clock()
                if self._active and now - self._burst_ended > _SILENCE:
                    self._suspend(self._active.values(), now)
                    self._runner.metrics.publish(now, at_once=True)

    def _suspend(self, requests: Iterable[ActiveRequest], now: float) -> None:
        """Free what requests hold that Triton has dropped, and forget them much later.

        A request that comes back after all continues where it was.
        """
        for request in requests:
            if not request.suspended:
                request.suspended = True
                self._runner.drop(request.job)
        self._active = {
            number: request
            for number, request in self._active.items()
            if not (request.suspended and now - request.queued > _FORGET_AFTER)
        }


def _read_controls(raw: Any) -> tuple[int, bool]:
    """Return the number of a request's sequence, and whether the sequence begins with it."""
    tensors = {tensor.name(): tensor for tensor in raw.inputs()}
    number, start = (int(tensors[name].as_numpy().reshape(-1)[0]) for name in ("CORRID", "START"))
    return number, bool(start)
