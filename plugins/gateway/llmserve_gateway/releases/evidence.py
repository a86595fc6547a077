"""Whether a new build fails more often than the old one: a test that may be looked at any time.

Each observation is a difference from -1 to 1: 1 if only the new build has failed a request, -1 if
only the old one has, 0 if both or none. Somebody who bets that its mean is above a limit wins in
the long run only if it is. If it is not, the chance that a fair bet ever multiplies its stake by
``1 / e`` is at most ``e`` (Ville's inequality), however often one looks, whatever the old build's
own failures are, and although they may change with the hour. Bets of several sizes are mixed, so
that none has to be chosen: large ones see a build that is broken after some requests, small ones
one that is a little worse after many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args

Verdict = Literal["worse", "fine", "undecided"]

_SIZES = (0.03, 0.06, 0.125, 0.25, 0.5, 0.75, 0.95)
"""What is bet, as parts of all that may be bet without losing everything at once."""


@dataclass(frozen=True)
class Tolerance:
    """How much worse a build may be, and how sure one is to be."""

    allowed: float
    """So much more often it may fail and is still not returned."""
    fault: float
    """So much more often it fails if it may not be promoted."""
    false_return: float = 0.01
    """The highest chance to return one that is within what is allowed."""
    false_promotion: float = 0.05
    """The highest chance to promote one that has such a fault."""

    def __post_init__(self) -> None:
        if not 0 <= self.allowed < self.fault <= 1:
            raise ValueError("a fault is more than what is allowed, and both are from 0 to 1")


@dataclass
class _Bets:
    """A stake of 1, spread over bets that a mean is above a limit; ``log`` of what each has."""

    limit: float
    """From -1 to below 1, as are the observations."""
    logs: list[float] = field(default_factory=lambda: [0.0] * len(_SIZES))

    def see(self, value: float) -> None:
        gains = _gains(self.limit, value)
        self.logs = [log + gain for log, gain in zip(self.logs, gains, strict=True)]

    @property
    def log(self) -> float:
        """The logarithm of all that is there."""
        most = max(self.logs)
        return most + math.log(sum(math.exp(log - most) for log in self.logs) / len(self.logs))


@lru_cache(64)
def _gains(limit: float, value: float) -> tuple[float, ...]:
    most = 1 / (1 + limit)
    return tuple(math.log1p(size * most * (value - limit)) for size in _SIZES)


class Evidence:
    """What has been seen of one way to fail. Nothing is better again after it was worse."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        self.seen = 0
        self.new_failures = 0
        self.old_failures = 0
        self.verdict: Verdict = "undecided"
        self._worse = _Bets(tolerance.allowed)
        # That the mean of the differences is below the fault: that of their negatives is above.
        self._fine = _Bets(-tolerance.fault)
        self._sum = 0.0

    def add(self, new_failed: float, old_failed: float) -> Verdict:
        """Note whether each build has failed a request, as parts of 1; return the verdict."""
        difference = float(new_failed) - float(old_failed)
        if not -1 <= difference <= 1:
            raise ValueError("a failure is from 0 to 1")
        self.seen += 1
        self.new_failures += new_failed > 0
        self.old_failures += old_failed > 0
        self._sum += difference
        self._worse.see(difference)
        self._fine.see(-difference)
        if self._worse.log >= -math.log(self.tolerance.false_return):
            # Also after it was fine: until it is promoted, both tests go on.
            self.verdict = "worse"
        elif self._fine.log >= -math.log(self.tolerance.false_promotion):
            self.verdict = "fine" if self.verdict == "undecided" else self.verdict
        return self.verdict

    def state(self) -> dict[str, Any]:
        """Return all that it has seen, as JSON has it."""
        return {
            "seen": self.seen, "new_failures": self.new_failures,
            "old_failures": self.old_failures, "verdict": self.verdict, "sum": self._sum,
            "worse": self._worse.logs, "fine": self._fine.logs,
        }  # fmt: skip

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on with what was seen before; raise ValueError if that is nothing like it."""
        counts = [state[name] for name in ("seen", "new_failures", "old_failures")]
        bets = [[float(log) for log in state[name]] for name in ("worse", "fine")]
        numbers = [*counts, state["sum"], *bets[0], *bets[1]]
        if (
            not all(type(count) is int and 0 <= count <= counts[0] for count in counts)
            or not all(map(math.isfinite, numbers))
            or any(len(logs) != len(_SIZES) for logs in bets)
            or state["verdict"] not in get_args(Verdict)
        ):
            raise ValueError("this is no evidence")
        self.seen, self.new_failures, self.old_failures = counts
        self.verdict, self._sum = state["verdict"], float(state["sum"])
        self._worse.logs, self._fine.logs = bets

    @property
    def difference(self) -> float | None:
        """How much more often the new build has failed, None before the first observation."""
        return self._sum / self.seen if self.seen else None

    @property
    def chance_if_fine(self) -> float:
        """A bound for the chance of what was seen if the build is within what is allowed."""
        return min(1.0, math.exp(-self._worse.log))

    @property
    def chance_if_faulty(self) -> float:
        """A bound for the chance of what was seen if the build has the fault."""
        return min(1.0, math.exp(-self._fine.log))


def joint_verdict(evidence: Sequence[Evidence]) -> Verdict:
    """Return what all say: one that is worse is enough, and all have to be fine.

    For one of several to return a build falsely with a chance of ``e``, each has its part of it.
    To promote one falsely, its own test has to fail: those chances do not add up.
    """
    verdicts = [each.verdict for each in evidence]
    if "worse" in verdicts:
        return "worse"
    return "fine" if verdicts and all(each == "fine" for each in verdicts) else "undecided"
