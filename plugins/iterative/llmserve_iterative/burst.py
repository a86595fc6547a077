"""How many steps to make before new requests can join."""

from __future__ import annotations

# What taking in and giving back a request costs at least, and what part of a burst that may be
# while others come all the time.
_COST = 0.00006
_PART = 0.05
# However calm it is, a new request waits no longer than that for its turn.
_LONGEST = 0.1
# A pause between two bursts that is longer was Triton's having nothing, and no cost.
_IDLE = 0.02
_LATEST = 0.25


class Burst:
    """Finds a length at which giving requests back costs little, and newcomers wait little.

    Triton takes a few milliseconds to bring many requests again. While new ones come, bursts are
    short all the same, so that those join soon. When none has come for some bursts, each is
    twice as long as the one before, until what lies between them is a small part.

    >>> burst = Burst(0.008)
    >>> burst.begin(now=0.0, came=1, all_of_them=1)
    >>> burst.length
    0.008
    """

    def __init__(self, shortest: float) -> None:
        self._shortest = shortest
        self._cost = 0.0
        self._requests = 1
        self._calm = 0
        self._began = 0.0
        self._ended: float | None = None
        self._pause = 0.0
        self.length = shortest

    def begin(self, now: float, came: int, all_of_them: int) -> None:
        """Take note that a burst begins, and how many of its requests are new."""
        self._pause = now - self._ended if self._ended is not None else _IDLE
        self._began = now
        self._requests = max(1, all_of_them)
        self._calm = 0 if came else self._calm + 1
        if not self._shortest:
            return
        least = max(self._shortest, all_of_them * _COST / _PART)
        longest = max(least, min(_LONGEST, self._requests * self._cost / _PART))
        self.length = min(longest, least * 2 ** min(self._calm, 8))

    def end(self, now: float, flown: float) -> None:
        """Take note that all is given back, and how many seconds went into the steps."""
        self._ended = now
        if self._pause < _IDLE:
            # By request: what many cost is no reason to keep newcomers waiting for a single one.
            cost = (self._pause + now - self._began - flown) / self._requests
            self._cost += _LATEST * (cost - self._cost)
