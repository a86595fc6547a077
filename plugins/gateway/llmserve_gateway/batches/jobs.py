"""A batch that is being answered: which of its lines are left, and when each may be asked."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from llmserve.client import BatchAnswers, BatchRequest, BatchRequests
from llmserve_gateway.batches.records import Batch


@dataclass
class Line:
    """A request that has no answer yet."""

    job: Job
    request: BatchRequest
    deaths: int = 0
    """How often its model died of it, or beside it."""
    waits: int = 0
    """How often its model was not back yet, after it had died."""
    delays: int = 0
    """How often it took too long."""
    is_charged: bool = False
    """Whether it counts against the limits of its key already."""
    faults: int = 0
    """How often the gateway itself failed."""


class Job:
    def __init__(self, batch: Batch, requests: BatchRequests, answers: BatchAnswers) -> None:
        self.batch = batch
        self.requests = requests
        self.answers = answers
        self.writing = asyncio.Lock()
        self.changed = asyncio.Event()
        self.in_flight: set[asyncio.Task[None]] = set()
        self.is_stopped = False
        self.lacks_key = False
        """Whether its key has been withdrawn, so that nothing of it may be asked."""
        self.suspects: deque[Line] = deque()
        """Lines whose model has died: each is asked again alone."""
        self._left: dict[str, deque[Line]] = {}
        """By model, so that one that is away holds up its own lines only."""
        self._not_before: dict[str, float] = {}
        for request in requests.all:
            if request.custom_id not in answers:
                self._left.setdefault(request.model, deque()).append(Line(self, request))

    @property
    def is_done(self) -> bool:
        return len(self.answers) >= len(self.requests.all)

    def unanswered(self) -> Iterator[BatchRequest]:
        return (r for r in self.requests.all if r.custom_id not in self.answers)

    def count(self) -> None:
        """Bring the numbers that the batch shows up to date."""
        self.batch.total = len(self.requests.all)
        self.batch.failed = self.answers.failed
        self.batch.completed = len(self.answers) - self.answers.failed

    def hold(self, model: str, until: float) -> None:
        """Ask nothing of a model before this moment."""
        self._not_before[model] = until

    def put_back(self, line: Line) -> None:
        if line.deaths:
            self.suspects.append(line)
        else:
            self._left.setdefault(line.request.model, deque()).appendleft(line)

    def has_suspect(self, now: float) -> bool:
        """Return whether one may be asked now."""
        return any(now >= self._not_before.get(s.request.model, 0.0) for s in self.suspects)

    def next_suspect(self, now: float) -> Line | None:
        for _ in range(len(self.suspects)):
            if now >= self._not_before.get(self.suspects[0].request.model, 0.0):
                return self.suspects.popleft()
            self.suspects.rotate(-1)
        return None

    def next(self, now: float) -> Line | None:
        """Return the next line that may be asked now."""
        for model, lines in self._left.items():
            if now >= self._not_before.get(model, 0.0):
                line = lines.popleft()
                if not lines:
                    # A file may name very many models, which are not all looked at each time.
                    del self._left[model]
                return line
        return None
