"""A request in flight, and what is known of its way through Triton's queue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmserve.runtime.job import Job

# After so long a pause nothing was waiting: what comes then has just been sent.
_PAUSE = 0.05


@dataclass
class Flight:
    """A request from its arrival to its last response.

    ``queued`` is when it went into Triton's queue for the last time, or a little earlier. A
    ``grounded`` one holds nothing in the engine: Triton seems to have let its request go.
    """

    job: Job
    began: float
    queued: float
    first: float | None = None
    counted: int = 0
    told: float = 0.0
    grounded: bool = False

    @property
    def over(self) -> bool:
        """Whether it is answered, or nobody is there to be answered."""
        return self.job.responder.closed or self.job.responder.gone

    @property
    def tokens(self) -> int:
        """How many tokens were made for it."""
        return sum(len(generation.token_ids) for generation in self.job.generations)


class Queue:
    """What the order tells in which requests come: Triton's queue is first in, first out.

    Whatever went into it before one that has come must have come as well. One that has not,
    was let go: its client left while it was waiting, and Triton tells nobody.
    """

    def __init__(self, now: float) -> None:
        self._ended = now
        self.reached = now
        """Everything that was queued before this moment has come."""

    def begin(self, now: float, queued: Iterable[float]) -> None:
        """Take note of what came: when it was queued, as far as that is known."""
        if now - self._ended > _PAUSE:
            self.reached = now - _PAUSE
        self.reached = max([self.reached, *queued])

    def end(self, now: float) -> None:
        """Take note that what is not done goes back into the queue."""
        self._ended = now

    def silent(self, now: float) -> float:
        """Return for how long nothing has come."""
        return now - self._ended
