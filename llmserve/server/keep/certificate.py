"""When a model is asked its known answers again, and what is concluded from what it says.

It is asked while it has nothing to do, and for a small share of the time. One wrong answer is a
doubt: another is asked at once, and then the same again. If either is wrong too, that is a fault.
It ends by the same test: once all known answers have come again, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.contract.report import CertificateReport, FaultReport
from llmserve.server.keep.picture import Checked

SHARE = 0.01
"""The share of the time for which a model is asked."""
SHARE_IN_FAULT = 0.1
"""The same while its answers are wrong: when that ends is worth knowing soon."""
INTERVAL = 5.0
"""Seconds between two questions at least."""
AGAIN = 1.0
"""Seconds until a doubt is followed by the next question."""
LATER = 60.0
"""Seconds until a model is asked again that could not be."""
OVERDUE = 600.0
"""Seconds after which a model is asked once although it is never idle."""
_QUIET = 1.0
"""Seconds without work after which a model is idle."""
_WORK = 0.05
"""The share of a processor from which on it works."""


@dataclass
class Certificate:
    """What is remembered of one model's answers. Times are seconds of a monotonic clock."""

    known: int = 0
    checks: int = 0
    faults: int = 0
    fault: FaultReport | None = None
    problem: str = ""
    number: int = 0
    """Which of the known answers is asked next."""
    next_at: float = 0.0
    """When it is asked next, at the earliest."""
    asked_at: float | None = None
    """Since when it is being asked."""
    load_number: int | None = None
    """Which load of the model was last seen."""
    doubtful: int | None = None
    """Which of the known answers did not come, and is asked once more."""
    passed: int = 0
    """How many answers in a row were right, since it had a fault."""
    _looked: tuple[float, float] | None = None
    """When, and at how many seconds of processors, it was last looked at."""
    _busy_at: float = 0.0

    def look(self, now: float, seconds: float, load_number: int) -> None:
        """Note how much it has worked until now, and which load it is."""
        if self._looked is not None:
            at, before = self._looked
            if abs(seconds - before) > _WORK * max(now - at, 0.25):
                self._busy_at = now
        else:
            self._busy_at = now
        self._looked = now, seconds
        if load_number != self.load_number:
            # Another process, perhaps with other files: it is asked soon, from the first on.
            self.load_number, self.number, self.passed = load_number, 0, 0
            self.asked_at, self.doubtful, self.next_at = None, None, now

    def is_due(self, now: float) -> bool:
        if self.asked_at is not None or now < self.next_at:
            return False
        return now - self._busy_at >= _QUIET or now - self.next_at >= OVERDUE

    def asked(self, now: float) -> int:
        """Note that it is being asked, and return which of its known answers."""
        self.asked_at = now
        return self.number

    def hear(self, checked: Checked, now: float) -> bool:
        """Draw conclusions; return whether its answers are now wrong, or right again."""
        self.asked_at = None
        if checked.load_number != self.load_number:
            return False
        self.known, self.problem = checked.known, checked.problem
        # What it worked on was this.
        self._looked = None
        if checked.problem:
            self.next_at = now + LATER
            return False
        self.checks += 1
        soon, share = (INTERVAL, SHARE) if self.fault is None else (AGAIN, SHARE_IN_FAULT)
        self.next_at = now + max(soon, checked.took / share)
        if checked.fault is None:
            return self._pass(now)
        self.passed = 0
        if self.fault is not None or self.doubtful is not None:
            is_new, self.fault = self.fault is None, checked.fault
            self.faults += is_new
            self._go_on()
            return is_new
        # Not the same again: an engine that repeats its last answer would then be right.
        self.doubtful, self.next_at = self.number, now + AGAIN
        self.number = self._other
        return False

    def _pass(self, now: float) -> bool:
        if self.doubtful is not None and self.doubtful != self.number:
            self.number, self.next_at = self.doubtful, now + AGAIN
            return False
        self._go_on()
        self.passed += 1
        if self.fault is None or self.passed < self.known:
            return False
        self.fault = None
        return True

    def _go_on(self) -> None:
        self.doubtful, self.number = None, self._other

    @property
    def _other(self) -> int:
        return (self.number + 1) % max(1, self.known)

    def report(self) -> CertificateReport:
        return CertificateReport(
            self.known, self.checks, self.faults, self.fault, int(self.fault is not None),
            self.problem,
        )  # fmt: skip
