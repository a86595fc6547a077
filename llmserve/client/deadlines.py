"""Timeouts of requests, as a whole and for their parts."""

from __future__ import annotations

import time
from copy import copy
from dataclasses import dataclass

from llmserve.errors import UsageError


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a request in seconds: in total, for the first message, and between messages.

    For a model that answers in one piece, ``first`` limits the whole answer. None is no limit. The
    time to connect is limited by the client, for all of its requests.

    >>> Timeouts(first=30, between=5)
    Timeouts(whole=None, first=30, between=5)
    """

    whole: float | None = None
    first: float | None = None
    between: float | None = None


Timeout = float | Timeouts | None
"""Seconds for a whole request, or for its parts; None is the default of the client."""


_MAX_SECONDS = 10**9


class Deadline:
    """The deadline of a request, over all of its messages."""

    def __init__(self, timeout: Timeout) -> None:
        self._parts = timeout if isinstance(timeout, Timeouts) else Timeouts(timeout)
        for seconds in (self._parts.whole, self._parts.first, self._parts.between):
            # gRPC treats a timeout that is out of its range as expired.
            if seconds is not None and not 0 < seconds <= _MAX_SECONDS:
                raise UsageError(
                    f"a timeout cannot be {seconds}",
                    hint=f"give seconds above 0, up to {_MAX_SECONDS}, or none",
                )
        self.seconds = self._parts.whole
        self._end = None if self.seconds is None else time.monotonic() + self.seconds
        self.started = False
        """Whether part of the answer has arrived."""

    def anew(self) -> Deadline:
        """Return one with the same end, for another request of the same time."""
        other = copy(self)
        other.started = False
        return other

    def left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def part(self) -> float | None:
        """The limit for the next message alone."""
        return self._parts.between if self.started else self._parts.first

    def next(self) -> float | None:
        """Return the limit for the next message, by its own and by the total."""
        limits = (self.part, self.left())
        return min((limit for limit in limits if limit is not None), default=None)

    def timeout_message(self, source: str) -> str:
        """Describe what has not arrived in time."""
        left = self.left()
        if self.part is None or (left is not None and left < self.part / 10):
            return f"no complete answer from {source} within {self.seconds or 0:g} s"
        return f"no {'more' if self.started else 'answer'} from {source} within {self.part:g} s"
