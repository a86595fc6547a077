"""A batch that is being answered: which of its lines are left, and when each may be asked."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from llmserve.client import BatchAnswers, BatchRequest, BatchRequests
from llmserve.contract.failures import back_off
from llmserve_gateway.batches.records import Batch


@dataclass
class Line:
    """A request that has no answer yet."""

    job: Job
    request: BatchRequest
    deaths: int = 0
    """How often its model died of it, or beside it."""
    delays: int = 0
    """How often it took too long."""
    is_charged: bool = False
    """Whether it counts against the limits of its key already."""
    answer_tokens: int = 0
    """How many tokens of answers to it do."""
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
        self._away: dict[str, int] = {}
        """The models that have died, and how often each was not back yet."""
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
            self.has_died(line.request.model)
        else:
            self._left.setdefault(line.request.model, deque()).appendleft(line)

    def has_died(self, model: str) -> None:
        """Ask nothing of a model before it is known to be back."""
        self._away.setdefault(model, 0)

    def away(self, now: float) -> list[str]:
        """Return the models that have died, if it is time to see whether they are back."""
        return [model for model in self._away if now >= self._not_before.get(model, 0.0)]

    def has_returned(self, model: str) -> None:
        self._away.pop(model, None)

    def is_still_away(self, model: str, now: float, pauses: tuple[float, float]) -> None:
        """Look for a model less often, the longer it is away: after the first to the last pause."""
        waits = self._away.get(model, 0)
        self._away[model] = waits + 1
        self.hold(model, now + back_off(waits, *pauses))

    def has_suspect(self, now: float) -> bool:
        """Return whether one may be asked now."""
        return any(self._may_be_asked(suspect.request.model, now) for suspect in self.suspects)

    def next_suspect(self, now: float) -> Line | None:
        for _ in range(len(self.suspects)):
            if self._may_be_asked(self.suspects[0].request.model, now):
                return self.suspects.popleft()
            self.suspects.rotate(-1)
        return None

    def _may_be_asked(self, model: str, now: float) -> bool:
        return model not in self._away and now >= self._not_before.get(model, 0.0)

    def next(self, now: float) -> Line | None:
        """Return the next line that may be asked now."""
        for model, lines in self._left.items():
            if self._may_be_asked(model, now):
                line = lines.popleft()
                if not lines:
                    # A file may name very many models, which are not all looked at each time.
                    del self._left[model]
                return line
        return None
