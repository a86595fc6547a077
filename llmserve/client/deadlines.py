"""How long a request may take, and which part of it took too long."""

from __future__ import annotations

import time
from dataclasses import dataclass

from llmserve.errors import UsageError


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a request has: for all of it, until something comes, and from then on.

    A model that answers in one piece has ``first`` for it. None is no end. The time to connect is
    the client's, for all of its requests.

    >>> Timeouts(first=30, between=5)
    Timeouts(whole=None, first=30, between=5)
    """

    whole: float | None = None
    first: float | None = None
    between: float | None = None


Timeout = float | Timeouts | None
"""Seconds for all of a request, or for its parts; None is what the client was made with."""


_LONGEST = 10**9


class Deadline:
    """The time that a request has, over all of its messages."""

    def __init__(self, timeout: Timeout) -> None:
        self._parts = timeout if isinstance(timeout, Timeouts) else Timeouts(timeout)
        for seconds in (self._parts.whole, self._parts.first, self._parts.between):
            # gRPC takes what it cannot count for a time that is over.
            if seconds is not None and not 0 < seconds <= _LONGEST:
                raise UsageError(
                    f"a timeout of {seconds} cannot be meant",
                    mend=f"give seconds above 0, up to {_LONGEST}, or none",
                )
        self.seconds = self._parts.whole
        self._end = None if self.seconds is None else time.monotonic() + self.seconds
        self.begun = False
        """Whether something of the answer has come."""

    def left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def part(self) -> float | None:
        """How long the next message may take by itself."""
        return self._parts.between if self.begun else self._parts.first

    def next(self) -> float | None:
        """Return how long the next message may take in all."""
        return min((each for each in (self.part, self.left()) if each is not None), default=None)

    def late(self, who: str) -> str:
        """Say what has not come in time, once it has not."""
        left = self.left()
        if self.part is None or (left is not None and left < self.part / 10):
            return f"no complete answer from {who} within {self.seconds or 0:g} s"
        return f"no {'more' if self.begun else 'answer'} from {who} within {self.part:g} s"
