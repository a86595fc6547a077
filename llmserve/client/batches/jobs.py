"""A file of requests that is being answered: which lines are left, and when each may be asked."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from llmserve.client.batches.answers import BatchAnswers
from llmserve.client.batches.requests import BatchRequest, BatchRequests
from llmserve.contract.failures import back_off

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds until something is tried again, if nobody has said when."""
SERVER = ""
"""What stands for the server itself, where others are models."""


@dataclass(eq=False)
class BatchLine:
    """A request that has no answer yet."""

    job: BatchJob
    request: BatchRequest
    tries: int = 0
    """How often it was refused, and may be answered later."""
    deaths: int = 0
    """How often its model, or the server, died of it, or beside it."""
    delays: int = 0
    """How often it took too long."""
    faults: int = 0
    """How often who asks failed itself."""
    has_missed: bool = False
    """Whether it was asked again because its model seemed to have come since."""
    is_alone: bool = False
    """Whether nothing else is asked meanwhile, because it may end its model."""

    def body(self) -> bytes:
        """Read what to send from the file; it is not larger than it is there."""
        body = self.job.requests.body(self.request)
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        # Half of a pair, which a request may have, is an escape in JSON.
        return text.encode(errors="backslashreplace")


@dataclass
class _Queue:
    """The lines for one model."""

    lines: deque[BatchLine] = field(default_factory=deque)
    resting: list[tuple[float, int, BatchLine]] = field(default_factory=list)
    """Those that the model has no room for, each until its moment."""


class BatchJob:
    """A file of requests, the file of answers to it, and what is known of its models."""

    def __init__(
        self,
        requests: BatchRequests,
        answers: BatchAnswers,
        *,
        name: str = "",
        owner: str = "",
        on_line: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self.requests = requests
        self.answers = answers
        self.name = name
        self.owner = owner
        """Whose it is, for who answers several."""
        self.on_line = on_line
        self.writing = asyncio.Lock()
        self.changed = asyncio.Event()
        self.in_flight: set[asyncio.Task[None]] = set()
        self.running: Counter[str] = Counter()
        """How many lines of each model are in flight."""
        self.is_stopped = False
        self.is_held = False
        """Whether nothing of it may be asked, and it is not known when that ends."""
        self.failure: Exception | None = None
        """Why nothing more of it is asked."""
        self.is_proven = len(answers) > answers.failed
        """Whether the server has answered: then a line that breaks each time is itself at fault."""
        self.suspects: deque[BatchLine] = deque()
        """Lines whose model has died: each is asked again alone."""
        self._left: dict[str, _Queue] = {}
        """By model, so that one that is away holds up its own lines only."""
        self._not_before: dict[str, float] = {}
        self._away: dict[str, int] = {}
        """The models that have died, and how often each was not back yet."""
        self._refusing: dict[str, float] = {}
        """When each model, or the server, began to refuse all requests."""
        for request in requests.all:
            if request.custom_id not in answers:
                self._queue(request.model).lines.append(BatchLine(self, request))

    @property
    def is_done(self) -> bool:
        return len(self.answers) >= len(self.requests.all)

    def unanswered(self) -> Iterator[BatchRequest]:
        return (r for r in self.requests.all if r.custom_id not in self.answers)

    def fail(self, error: Exception) -> None:
        """Ask nothing more, since all other lines would fail of the same."""
        self.failure = self.failure or error
        self.is_held = True
        self.changed.set()

    def hold(self, model: str, until: float) -> None:
        """Ask nothing of a model, or of the server, before this moment."""
        self._not_before[model] = until

    def rest(self, line: BatchLine, until: float) -> None:
        """Ask a line again at this moment; until then its model gets one line fewer at a time."""
        queue = self._queue(line.request.model)
        heappush(queue.resting, (until, line.request.number, line))

    def put_back(self, line: BatchLine) -> None:
        if line.deaths:
            self.suspects.append(line)
            self.has_died(line.request.model)
        else:
            self._queue(line.request.model).lines.appendleft(line)

    def gives_up(self, model: str, at: float, patience: float | None, now: float) -> bool:
        """Return whether patience is over at that moment; it is that of all lines together.

        So a model that is gone costs a batch this time once, and not once for each line.
        """
        since = self._refusing.setdefault(model, now)
        return patience is not None and at > since + patience

    def has_answered(self, model: str) -> None:
        self._refusing.pop(model, None)

    def has_died(self, model: str) -> None:
        """Ask nothing of a model before it is known to be back."""
        self._away.setdefault(model, 0)

    def away(self, now: float) -> list[str]:
        """Return the models that have died, if it is time to see whether they are back."""
        return [model for model in self._away if self._is_free(model, now)]

    def has_returned(self, model: str) -> None:
        self._away.pop(model, None)

    def is_still_away(self, model: str, now: float) -> float:
        """Look for a model less often, the longer it is away; return when the next time is."""
        waits = self._away.get(model, 0)
        self._away[model] = waits + 1
        at = now + back_off(waits, FIRST_PAUSE, LONGEST_PAUSE)
        self.hold(model, at)
        return at

    def has_suspect(self, now: float) -> bool:
        """Return whether one may be asked now."""
        return any(self._may_be_asked(suspect.request.model, now) for suspect in self.suspects)

    def next_suspect(self, now: float) -> BatchLine | None:
        for _ in range(len(self.suspects)):
            if self._may_be_asked(self.suspects[0].request.model, now):
                return self.suspects.popleft()
            self.suspects.rotate(-1)
        return None

    def next(self, now: float, room: int) -> BatchLine | None:
        """Return the next line that may be asked now, if so many may be in flight."""
        for model, queue in self._left.items():
            if self._may_be_asked(model, now) and (line := self._take(model, queue, now, room)):
                if not (queue.lines or queue.resting):
                    # A file may name very many models, which are not all looked at each time.
                    del self._left[model]
                return line
        return None

    def _take(self, model: str, queue: _Queue, now: float, room: int) -> BatchLine | None:
        if queue.resting and queue.resting[0][0] <= now:
            return heappop(queue.resting)[-1]
        # What the model has refused leaves no room that it would not refuse again.
        if queue.lines and self.running[model] + len(queue.resting) < room:
            return queue.lines.popleft()
        return None

    def _queue(self, model: str) -> _Queue:
        return self._left.setdefault(model, _Queue())

    def _may_be_asked(self, model: str, now: float) -> bool:
        return model not in self._away and self._is_free(model, now)

    def _is_free(self, model: str, now: float) -> bool:
        return all(now >= self._not_before.get(name, 0.0) for name in (model, SERVER))
