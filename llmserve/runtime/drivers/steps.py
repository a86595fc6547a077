"""What drivers hold to run an engine step by step."""

from __future__ import annotations

import time
from collections.abc import Iterable

from llmserve.runtime.answer.generation import Generation
from llmserve.runtime.drivers.job import Job
from llmserve.runtime.errors import panics_as_errors
from llmserve.runtime.metrics import Metrics
from llmserve.runtime.protocols import Parts, Stepper

# Sending a response takes about 0.25 ms, and up to 0.7 while all cores compute, whatever it
# contains. Sending one per stream and piece may take the first share of the time, or up to the
# second if a stream's pieces would otherwise be further apart than this many seconds.
_SENDING_SHARE, _LARGEST_SENDING_SHARE = 0.03, 0.3
_SMOOTH_INTERVAL = 0.1
_FIRST_ESTIMATE = 0.00025
# In a shared stream, pieces of steps that are shorter than this many seconds join.
_SHARED_INTERVAL = 0.01
# How much a new measurement counts in the average, and how long it may be: a pause of the machine
# must not make the pieces after it rare.
_NEWEST_WEIGHT = 0.05
_LONGEST_SENDING = 0.002


class JobRunner:
    """Runs jobs on the engine of a generator of mode ``"step"``; a driver decides when.

    ``metrics`` are published by the driver, and ``now`` is the time of its clock.
    """

    def __init__(self, parts: Parts, now: float) -> None:
        self._engine: Stepper = parts.generator.stepper(parts.tokenizer)
        self.metrics = Metrics(parts, self._engine, now)
        self._sending_time = _FIRST_ESTIMATE
        self._shared = parts.shared
        self._step_time = self._shared_due = 0.0
        if self._shared is not None:
            self._shared.flushes = True

    @property
    def busy(self) -> bool:
        return self._engine.busy

    def close(self) -> None:
        """End the engine and release the metrics; the model is being unloaded."""
        # Only some engines have this method.
        if close := getattr(self._engine, "close", None):
            close()
        self.metrics.close()

    def admit(self, job: Job) -> bool:
        """Admit a request to the engine and return whether it was accepted; if not, it fails."""
        try:
            with panics_as_errors():
                for generation in job.generations:
                    generation.settle()
                for generation in job.generations:
                    if not generation.done:
                        self._engine.admit(generation)
        except Exception as error:
            self.give_up(job, error)
            return False
        return True

    def step(self, jobs: Iterable[Job]) -> list[tuple[Generation, Exception]]:
        """Run a step and return the generations that failed, with their errors."""
        if self._shared is not None:
            self._shared.flush()
        started = time.perf_counter()
        try:
            with panics_as_errors():
                return self._engine.step().failed
        except Exception as error:
            # The culprit is unknown, so all requests fail, and the engine is free for new ones.
            return [(generation, error) for job in jobs for generation in job.generations]
        finally:
            self._step_time = time.perf_counter() - started

    def interval(self, jobs: Iterable[Job]) -> float:
        """Return the time between two pieces of a stream, from what sending has taken so far."""
        seconds = self._sending_time * sum(job.streams and not job.previewed for job in jobs)
        longest = max(_SMOOTH_INTERVAL, seconds / _LARGEST_SENDING_SHARE)
        return min(seconds / _SENDING_SHARE, longest)

    def send_news(self, job: Job, now: float, next_piece: float) -> bool:
        """Send an end at once and a stream's piece when due; return whether anything was sent.

        What goes out in a shared stream waits for :meth:`flush`, whenever ``next_piece`` may be.
        """
        self.metrics.made(job, now)
        previewed = job.previewed
        if previewed:
            next_piece = 0.0 if job.can_restart else self._shared_due
        due = job.done or (job.streams and now >= next_piece)
        if not due or job.responder.closed:
            return False
        try:
            with panics_as_errors():
                if news := job.done or job.has_news:
                    started = time.perf_counter()
                    job.send()
                    if not (job.done or previewed):
                        taken = min(time.perf_counter() - started, _LONGEST_SENDING)
                        self._sending_time += _NEWEST_WEIGHT * (taken - self._sending_time)
                return news
        except Exception as error:
            # A tokenizer's or formatter's error with one answer must not fail the others.
            self.give_up(job, error)
            return False

    def flush(self, now: float) -> None:
        """Send what all requests have for shared streams; a driver calls it after each step."""
        if self._shared is not None and self._shared.flush():
            self._shared_due = now + _SHARED_INTERVAL - self._step_time

    def give_up(self, job: Job, error: Exception) -> None:
        """Answer a request with an error and free its resources."""
        self.drop(job)
        if not job.responder.closed:
            job.responder.fail(error)

    def cancel(self, job: Job) -> None:
        """Drop a request whose client no longer waits."""
        self.drop(job)
        for generation in job.generations:
            generation.cancel()

    def drop(self, job: Job) -> None:
        """Free what a request holds in the engine."""
        for generation in job.generations:
            self._engine.drop(generation)
