"""In-flight batching on Triton's iterative scheduling.

Triton hands over all requests that are under way, those that have just come among them; the
engine makes a burst of steps for all of them; what is new is sent; and each request that is not
done is given back to be scheduled again. Between two bursts new requests can join.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.runtime.job import Job
from llmserve.runtime.protocols import Parts, Stepper
from llmserve.runtime.responder import Responder
from llmserve_iterative.burst import Burst
from llmserve_iterative.controls import NOBODY, Numbers, read_controls
from llmserve_iterative.flight import Flight, Queue
from llmserve_iterative.metrics import Metrics
from llmserve_iterative.watch import Watch

# What Triton takes for a response, and to say whether a client is still there. The time between
# two of them is long enough that they stay a small part of it.
_RESPONSE_COST = 0.00025
_ASKING_COST = 0.00006
_SMALL_PART = 0.05
_LATELY = 0.02

_ABANDONED = 60.0
# When Triton has had nothing for so long, none of those in flight is with it any more.
_SILENCE = 1.0
# Triton ends a sequence that it has not seen for the idle time, and then loses a request of it
# that is given back: nobody would ever answer it. One that comes near is kept to its end.
_NEAR = 0.8


class IterativeDriver:
    """Answers Triton's rescheduled requests through a generator of the mode ``"step"``."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        del folder
        self._clock = clock
        self._burst = Burst(settings["burst_ms"] / 1000)
        self._patience = _NEAR * settings["idle_seconds"]
        self._flights: dict[int, Flight] = {}
        self._numbers = Numbers()
        self._queue = Queue(self._clock())
        self._lock = Lock()
        self._watch = Watch(self._look_after, _SILENCE / 2)

    @property
    def in_flight(self) -> int:
        """How many requests are under way."""
        return len(self._flights)

    @property
    def figures(self) -> Mapping[str, Any]:
        """The families of metrics, by their names without prefix."""
        return self._metrics.families

    def start(self, parts: Parts) -> None:
        """Take the model's other parts."""
        self._parts = parts
        self._engine: Stepper = parts.generator.stepper(parts.tokenizer)
        self._metrics = Metrics(parts.pb_utils, parts.name)

    def execute(self, requests: Sequence[Any]) -> None:
        """Take in what came, make a burst of steps, and give back what is not done."""
        with self._lock:
            self._execute(requests)

    def finalize(self) -> None:
        """Forget what is under way; the model is being unloaded."""
        self._watch.stop()
        for flight in self._flights.values():
            self._drop(flight.job)
        self._flights.clear()
        self._metrics.close()

    def _execute(self, requests: Sequence[Any]) -> None:
        now = self._clock()
        controls = [read_controls(raw) for raw in requests]
        known = [self._flights[number] for number, _ in controls if number in self._flights]
        self._queue.begin(now, [flight.queued for flight in known])
        self._burst.begin(now, sum(start for _, start in controls), len(requests))
        present = {}
        for raw, (number, start) in zip(requests, controls, strict=True):
            if self._arrive(raw, number, start, now):
                present[number] = raw
        absent = [flight for number, flight in self._flights.items() if number not in present]
        self._ground([flight for flight in absent if flight.queued < self._queue.reached])
        self._forget_abandoned(now)
        flights = [self._flights[number] for number in present]
        for flight in flights:
            flight.job.responder.recent = max(_LATELY, len(flights) * _ASKING_COST / _SMALL_PART)
        begun = self._clock()
        self._fly(flights, now)
        now = self._clock()
        flown = now - begun
        for number, raw in present.items():
            flight = self._flights[number]
            closed = flight.job.responder.closed
            if not closed:
                # Who has left is given back unanswered as well: then Triton lets go of it and of
                # its sequence's place at once, and otherwise only after the idle time.
                raw.set_release_flags(self._parts.pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            if closed or self._left(flight, now=True):
                del self._flights[number]
            else:
                flight.queued = now
                self._watch.start()
            flight.job.responder.detach()
        self._queue.end(now)
        self._publish(at_once=not self._flights)
        self._burst.end(self._clock(), flown)

    def _arrive(self, raw: Any, number: int, start: bool, now: float) -> bool:
        """Match a request with its flight, or begin one; say whether it goes on."""
        if number == NOBODY:
            raw.get_response_sender().send(
                flags=self._parts.pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            )
            return False
        if start:
            return self._begin(raw, number, now)
        flight = self._flights.get(number)
        if flight is None:
            Responder(raw, self._parts).refuse("this request was given up: send it again")
            return False
        flight.job.responder.attach(raw)
        if not self._left(flight) and flight.grounded:
            self._resume(flight.job)
        flight.grounded = False
        return True

    def _left(self, flight: Flight, *, now: bool = False) -> bool:
        """Whether the client has gone; then nothing of its request is left."""
        gone = flight.job.responder.cancelled(now=now)
        if gone:
            self._drop(flight.job)
            for generation in flight.job.generations:
                generation.cancel()
        return gone

    def _resume(self, job: Job) -> None:
        try:
            for generation in job.generations:
                if not generation.done:
                    self._engine.admit(generation)
        except Exception as error:
            self._drop(job)
            job.responder.fail(error)

    def _begin(self, raw: Any, number: int, now: float) -> bool:
        job = Job(raw, self._parts, eager=False)
        try:
            self._numbers.take(raw, number, self._flights)
            job.admit(raw)
            for generation in job.generations:
                self._engine.admit(generation)
        except RequestError as error:
            self._drop(job)
            job.responder.refuse(str(error))
        except Exception as error:
            self._drop(job)
            job.responder.fail(error)
        else:
            self._flights[number] = Flight(job, began=now, queued=self._queue.reached)
            prompts = sum(len(generation.prompt_ids) for generation in job.generations)
            self._metrics.count("input_tokens_total", prompts)
            return True
        return False

    def _fly(self, flights: Sequence[Flight], began: float) -> None:
        """Make steps until it is time to ask Triton for new requests.

        Those that Triton would lose are made to their end, however long that takes.
        """
        burst = self._burst.length
        streams = sum(flight.job.streams for flight in flights)
        pace = streams * _RESPONSE_COST / _SMALL_PART if burst else 0.0
        if began - self._queue.reached > self._patience / 4:
            # Only who is given back and comes again shows how long the others have been waiting.
            burst = 0.0
        while self._engine.busy:
            for generation, error in self._engine.step().failed:
                self._fail(generation, error)
            now = self._clock()
            for flight in flights:
                self._measure(flight, now)
                self._tell(flight, now, pace)
            going = [flight for flight in flights if not flight.over]
            late = any(now - flight.queued > self._patience for flight in going)
            if not going or (now - began >= burst and not late):
                break
        now = self._clock()
        for flight in flights:
            # What was away while others' steps made its last tokens comes with none to make.
            self._measure(flight, now)
            self._tell(flight, now, pace)

    def _measure(self, flight: Flight, now: float) -> None:
        made = flight.tokens - flight.counted
        if not made:
            return
        flight.counted += made
        self._metrics.count("output_tokens_total", made)
        if flight.first is None:
            flight.first = now
            self._metrics.count("first_token_seconds_sum", now - flight.began)
            self._metrics.count("first_token_seconds_count", 1)
        if flight.job.done and flight.counted > 1:
            self._metrics.count("token_seconds_sum", now - flight.first)
            self._metrics.count("token_seconds_count", flight.counted - 1)

    def _publish(self, *, at_once: bool) -> None:
        engine = self._engine
        gauges = {
            "running_sequences": engine.live,
            "waiting_sequences": engine.waiting,
            "cache_used_tokens": engine.cache_used,
            "cache_tokens": engine.cache_tokens,
        }
        self._metrics.publish(self._clock(), gauges, at_once=at_once)

    def _tell(self, flight: Flight, now: float, pace: float) -> None:
        """Send what is new: the first piece and the end at once, the others at a steady pace."""
        job = flight.job
        if flight.over:
            return
        if not job.done and not (job.streams and now - flight.told >= pace):
            return
        try:
            if any(generation.has_news for generation in job.generations):
                flight.told = now
            job.tell()
        except Exception as error:
            # What a tokenizer or formatter makes of one answer is no reason for others to fail.
            self._drop(job)
            job.responder.fail(error)

    def _fail(self, generation: Generation, error: Exception) -> None:
        for flight in self._flights.values():
            job = flight.job
            if generation in job.generations:
                self._drop(job)
                if job.responder.attached:
                    job.responder.fail(error)
                else:
                    # Its request is with Triton now; it is told when it comes again.
                    generation.cancel()

    def _look_after(self) -> bool:
        """Free what nobody waits for when no request comes that would bring it to light."""
        if not self._lock.acquire(blocking=False):
            return True
        try:
            now = self._clock()
            if self._queue.silent(now) > _SILENCE:
                self._ground(self._flights.values())
                self._forget_abandoned(now)
                self._publish(at_once=True)
            return bool(self._flights) or self._watch.enough()
        finally:
            self._lock.release()

    def _ground(self, flights: Iterable[Flight]) -> None:
        """Free what a request holds that Triton has let go.

        Should it come again after all, it goes on from where it was.
        """
        for flight in flights:
            if not flight.grounded:
                flight.grounded = True
                self._drop(flight.job)

    def _forget_abandoned(self, now: float) -> None:
        gone = [n for n, f in self._flights.items() if f.grounded and now - f.queued > _ABANDONED]
        for number in gone:
            del self._flights[number]

    def _drop(self, job: Job) -> None:
        for generation in job.generations:
            self._engine.drop(generation)
