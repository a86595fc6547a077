"""Continuous batching by a thread of the model's own.

Triton hands requests over and is let go at once. The thread makes steps for as long as anything
is under way; what has arrived joins before the next step, and answers leave through the
requests' own senders. It drives any generator of the mode ``"step"``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.runtime.job import Job
from llmserve.runtime.protocols import Parts, Stepper

# A response takes Triton about 0.25 ms whatever is in it. With so much time between two pieces
# of a stream, for each stream that there is, sending stays a small part of the work.
_PACE = 0.005


@dataclass
class Flight:
    """A request under way, and when its next piece may leave."""

    job: Job
    due: float = 0.0


class ContinuousDriver:
    """Answers requests through a generator that can be stepped, from a thread of its own."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del settings, folder
        self._arrived: SimpleQueue[Job | None] = SimpleQueue()
        self._flights: list[Flight] = []

    def start(self, parts: Parts) -> None:
        """Take the model's other parts and start the thread."""
        self._parts = parts
        self._engine: Stepper = parts.generator.stepper(parts.tokenizer)
        self._thread = Thread(target=self._run, name=f"{parts.name}-steps", daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Read requests and hand them to the thread; Triton may bring the next ones at once."""
        for raw in requests:
            job = Job(raw, self._parts, eager=False)
            try:
                job.admit(raw)
            except RequestError as error:
                job.responder.refuse(str(error))
            except Exception as error:
                job.responder.fail(error)
            else:
                self._arrived.put(job)

    def finalize(self) -> None:
        """End the thread; whoever still waits is told."""
        self._arrived.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._take_in():
            try:
                failed = self._engine.step().failed
            except Exception as error:
                # Nobody knows whose fault it was, so all of them are told, and the next can come.
                failed = [(g, error) for f in self._flights for g in f.job.generations]
            for generation, why in failed:
                self._fail(generation, why)
            self._tell_all(time.monotonic())

    def _take_in(self) -> bool:
        """Begin what has arrived, and wait while there is nothing to do; False is the end."""
        while True:
            try:
                job = self._arrived.get(block=not self._flights)
            except Empty:
                return True
            if job is None:
                for flight in self._flights:
                    self._end(flight.job, RuntimeError("the model is being unloaded"))
                return False
            try:
                for generation in job.generations:
                    self._engine.admit(generation)
            except Exception as error:
                self._end(job, error)
            else:
                self._flights.append(Flight(job))

    def _tell_all(self, now: float) -> None:
        pace = _PACE * sum(flight.job.streams for flight in self._flights)
        for flight in self._flights:
            job = flight.job
            try:
                if job.responder.cancelled():
                    for generation in job.generations:
                        self._engine.drop(generation)
                        generation.cancel()
                if job.done or (job.streams and now >= flight.due and _has_news(job)):
                    flight.due = now + pace
                    job.tell()
            except Exception as error:
                self._end(job, error)
        self._flights = [flight for flight in self._flights if not flight.job.responder.closed]

    def _fail(self, generation: Generation, error: Exception) -> None:
        for flight in self._flights:
            if generation in flight.job.generations:
                self._end(flight.job, error)

    def _end(self, job: Job, error: Exception) -> None:
        """Give up a request and free what it holds."""
        for generation in job.generations:
            self._engine.drop(generation)
        if job.responder.closed:
            return
        if isinstance(error, RequestError):
            job.responder.refuse(str(error))
        else:
            job.responder.fail(error)


def _has_news(job: Job) -> bool:
    return any(generation.has_news for generation in job.generations)
