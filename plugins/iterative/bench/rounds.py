"""Two ways of the same thing, measured in turns, because a machine is never quite still."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

Measure = Callable[[], float]


@dataclass(frozen=True)
class Target:
    """What a ratio should reach: at least that much, or at most."""

    value: float
    at_least: bool = True

    def met(self, ratio: float) -> bool:
        """Whether a ratio is good enough."""
        return ratio >= self.value if self.at_least else ratio <= self.value

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.value:g}"


@dataclass(frozen=True)
class Line:
    """One line of the table: ours and theirs in every round, in the same unit."""

    label: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float]
    target: Target

    @property
    def ratios(self) -> list[float]:
        """Ours over theirs, round by round, the smallest first."""
        return sorted(a / b for a, b in zip(self.ours, self.theirs, strict=True))

    def cells(self) -> list[str]:
        """Return what the table shows."""
        ratios = self.ratios
        middle = median(ratios)
        return [
            self.label,
            f"{median(self.ours):.3g} {self.unit}",
            f"{median(self.theirs):.3g} {self.unit}",
            f"{middle:.2f}",
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            str(self.target),
            "reached" if self.target.met(middle) else "short",
        ]


@dataclass(frozen=True)
class Skipped:
    """A line that could not be measured here, and why."""

    label: str
    reason: str

    def cells(self) -> list[str]:
        """Return what the table shows."""
        return [self.label, self.reason, "", "", "", "", "skipped"]


def in_turns(ours: Measure, theirs: Measure, rounds: int) -> tuple[list[float], list[float]]:
    """Measure both, so many times each, with the first place changing hands; one warms up."""
    ours()
    theirs()
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for side in (0, 1) if turn % 2 else (1, 0):
            found[side].append((ours, theirs)[side]())
    return found
