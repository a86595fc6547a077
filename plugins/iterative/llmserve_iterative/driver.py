"""In-flight batching on Triton's iterative scheduling.

Triton hands over all requests that are under way, those that have just come among them; the
engine makes a burst of steps for all of them; what is new is sent; and each request that is not
done is given back to be scheduled again. Between two bursts new requests can join.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.runtime.job import Job
from llmserve.runtime.protocols import Parts, Stepper
from llmserve.runtime.responder import Responder
from llmserve_iterative.metrics import Metrics

# What Triton takes for a sequence that is scheduled again and for a response that is sent. A
# burst and the time between two pieces are long enough that this stays a small part of them.
_SCHEDULING_COST = 0.00006
_RESPONSE_COST = 0.00025
_SMALL_PART = 0.05

_ABANDONED = 300.0
_OWN_IDS = 1 << 16
_END = 2
# What fills a direct slot that has no request.
_NOBODY = 0


@dataclass
class Flight:
    """A request in flight, and when it was last seen and told."""

    job: Job
    began: float
    seen: float
    first: float | None = None
    counted: int = 0
    told: float = 0.0

    @property
    def tokens(self) -> int:
        """How many tokens were made for it."""
        return sum(len(generation.token_ids) for generation in self.job.generations)


class IterativeDriver:
    """Answers Triton's rescheduled requests through a generator of the mode ``"step"``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self._burst = settings["burst_ms"] / 1000
        self._flights: dict[int, Flight] = {}
        self._latest_id = 0

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
        now = time.monotonic()
        present = {}
        for raw in requests:
            if (arrived := self._arrive(raw, now)) is not None:
                present[arrived] = raw
        self._forget_abandoned(now)
        flights = [self._flights[number] for number in present]
        self._fly(flights, now)
        for number, raw in present.items():
            flight = self._flights[number]
            if flight.job.responder.closed:
                del self._flights[number]
            else:
                raw.set_release_flags(self._parts.pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                flight.job.responder.detach()
        self._publish()

    def finalize(self) -> None:
        """Forget what is under way; the model is being unloaded."""
        for flight in self._flights.values():
            self._drop(flight.job)
        self._flights.clear()
        self._metrics.close()

    def _arrive(self, raw: Any, now: float) -> int | None:
        """Match a request with its flight, or begin one; return its number if it goes on."""
        number = self._control(raw, "CORRID")
        if number == _NOBODY:
            raw.get_response_sender().send(
                flags=self._parts.pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            )
            return None
        flight = self._flights.get(number)
        if not self._control(raw, "START"):
            if flight is None:
                Responder(raw, self._parts).refuse("this request was given up: send it again")
                return None
            flight.seen = now
            flight.job.responder.attach(raw)
            if flight.job.responder.cancelled():
                for generation in flight.job.generations:
                    self._engine.drop(generation)
                    generation.cancel()
            return number
        job = Job(raw, self._parts, eager=False)
        try:
            self._refuse_own_id(raw, number)
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
            self._flights[number] = Flight(job, now, now)
            prompts = sum(len(generation.prompt_ids) for generation in job.generations)
            self._metrics.count("input_tokens_total", prompts)
            return number
        return None

    def _refuse_own_id(self, raw: Any, number: int) -> None:
        """Triton numbers its sequences itself; a client's number would mix two requests up."""
        by_itself = number - self._latest_id < _OWN_IDS and number not in self._flights
        if isinstance(raw.correlation_id(), str) or raw.flags() & _END or not by_itself:
            raise RequestError(
                "this model makes a sequence of every request by itself: send it without a "
                "sequence id"
            )
        self._latest_id = max(self._latest_id, number)

    def _fly(self, flights: Sequence[Flight], began: float) -> None:
        """Make steps until it is time to ask Triton for new requests."""
        burst = pace = 0.0
        if self._burst:
            streams = sum(flight.job.streams for flight in flights)
            burst = max(self._burst, len(flights) * _SCHEDULING_COST / _SMALL_PART)
            pace = streams * _RESPONSE_COST / _SMALL_PART
        while self._engine.busy:
            for generation, error in self._engine.step().failed:
                self._fail(generation, error)
            now = time.monotonic()
            for flight in flights:
                self._measure(flight, now)
                self._tell(flight, now, pace)
            if now - began >= burst or all(f.job.responder.closed for f in flights):
                break
        for flight in flights:
            self._tell(flight, time.monotonic(), pace)

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

    def _publish(self) -> None:
        engine = self._engine
        gauges = {
            "running_sequences": engine.live,
            "waiting_sequences": engine.waiting,
            "cache_used_tokens": engine.cache_used,
            "cache_tokens": engine.cache_tokens,
        }
        self._metrics.publish(time.monotonic(), gauges, at_once=not self._flights)

    def _tell(self, flight: Flight, now: float, pace: float) -> None:
        """Send what is new: the first piece and the end at once, the others at a steady pace."""
        job = flight.job
        if job.responder.closed:
            return
        if job.done or (job.streams and now - flight.told >= pace):
            if any(generation.has_news for generation in job.generations):
                flight.told = now
            job.tell()

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

    def _forget_abandoned(self, now: float) -> None:
        """A request whose client has gone may never be scheduled again."""
        gone = [n for n, flight in self._flights.items() if now - flight.seen > _ABANDONED]
        for number in gone:
            self._drop(self._flights.pop(number).job)

    def _drop(self, job: Job) -> None:
        for generation in job.generations:
            self._engine.drop(generation)

    @staticmethod
    def _control(raw: Any, name: str) -> int:
        tensor = next(tensor for tensor in raw.inputs() if tensor.name() == name)
        return int(tensor.as_numpy().reshape(-1)[0])
