"""What drivers of an engine that makes steps have in common."""

from __future__ import annotations

from collections.abc import Iterable

from llmserve.runtime.errors import panics_as_errors
from llmserve.runtime.generation import Generation
from llmserve.runtime.job import Job
from llmserve.runtime.metrics import Metrics
from llmserve.runtime.protocols import Parts, Stepper

# A response takes Triton about 0.25 ms whatever is in it. With so many seconds between two pieces
# of a stream, for each stream that there is, sending stays a small part of the work.
_STREAM_INTERVAL = 0.005


class StepDriver:
    def _set_up(self, parts: Parts, now: float) -> None:
        self._parts = parts
        self._engine: Stepper = parts.generator.stepper(parts.tokenizer)
        self._metrics = Metrics(parts, self._engine, now)

    def _admit(self, job: Job) -> bool:
        """Give the engine a request, which fails if that is refused; say whether it was taken."""
        try:
            with panics_as_errors():
                for generation in job.generations:
                    if not generation.done:
                        self._engine.admit(generation)
        except Exception as error:
            self._give_up(job, error)
            return False
        return True

    def _make_step(self, jobs: Iterable[Job]) -> list[tuple[Generation, Exception]]:
        """Make a step for those that the engine has, and return who failed at it."""
        try:
            with panics_as_errors():
                return self._engine.step().failed
        except Exception as error:
            # Nobody knows whose fault it was, so all of them fail, and the next can come.
            return [(generation, error) for job in jobs for generation in job.generations]

    def _interval(self, jobs: Iterable[Job]) -> float:
        """Return the time between two pieces of a stream."""
        return _STREAM_INTERVAL * sum(job.streams for job in jobs)

    def _send_news(self, job: Job, now: float, next_piece: float) -> bool:
        """Send the end at once and a stream's piece when it is time; say whether any left."""
        self._metrics.made(job, now)
        due = job.done or (job.streams and now >= next_piece)
        if not due or job.responder.closed:
            return False
        try:
            with panics_as_errors():
                if news := job.done or job.has_news:
                    job.send()
                return news
        except Exception as error:
            # What a tokenizer or formatter makes of one answer is no reason for others to fail.
            self._give_up(job, error)
            return False

    def _give_up(self, job: Job, error: Exception) -> None:
        """Answer a request with what went wrong, and free what it holds."""
        self._drop(job)
        if not job.responder.closed:
            job.responder.fail(error)

    def _cancel(self, job: Job) -> None:
        """Leave nothing of a request that nobody waits for."""
        self._drop(job)
        for generation in job.generations:
            generation.cancel()

    def _drop(self, job: Job) -> None:
        for generation in job.generations:
            self._engine.drop(generation)
