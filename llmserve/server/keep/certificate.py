"""When a model is asked its known answers again, and what is concluded from what it says.

It is asked while it has nothing to do, and for a small share of the time. One wrong answer is a
doubt: another is asked at once, and then the same again. If either is wrong too, that is a fault.
It ends by the same test: once all known answers have come again, one after the other.

In the same way it is asked about answers that it has given to users: each is one more question,
which is forgotten once it has been answered. One that was wrong is kept until the fault ends, but
not for long: the model is asked for it anew, among the known answers.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from llmserve.contract.live_answer import LiveAnswer
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
LIVE = -1
"""The number of the question that is a user's answer."""
KEPT = 600.0
"""Seconds after which a user's answer is forgotten, whatever has come of it."""
MOST_WAITING = 4
"""How many of them a model has at once."""
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
    judged: int = 0
    unjudged: str = ""
    live: LiveAnswer | None = None
    """The user's answer that is judged, or that was wrong."""
    _live_since: float = 0.0
    _waiting: deque[tuple[float, LiveAnswer]] = field(
        default_factory=lambda: deque(maxlen=MOST_WAITING)
    )
    """Users' answers that are to be judged, the newest ones, and since when."""
    _after_live: int = 0
    """Which known answer is asked after that."""
    _was_live: bool = False
    _loaded_at: float = math.inf
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
            self.live, self._loaded_at = None, now
            self._waiting.clear()

    def offer(self, answer: LiveAnswer, now: float) -> None:
        """Keep a user's answer until the model is idle, if it is of this load of it.

        Of a model that is wrong already, nothing is to be learned from more of them.
        """
        is_new = now - answer.age > self._loaded_at
        if is_new and self.fault is None:
            self._waiting.append((now, answer))

    def forget_old(self, now: float) -> None:
        """Forget users' answers that were kept for long enough, judged or not."""
        while self._waiting and now - self._waiting[0][0] > KEPT:
            self._waiting.popleft()
        is_asked = self.asked_at is not None
        if self.live is not None and not is_asked and now - self._live_since > KEPT:
            self._forget_live()

    def is_due(self, now: float) -> bool:
        if self.asked_at is not None or now < self.next_at:
            return False
        return now - self._busy_at >= _QUIET or now - self.next_at >= OVERDUE

    def asked(self, now: float) -> int:
        """Note that it is being asked, and return which of its known answers, or ``LIVE``."""
        self.forget_old(now)
        self.asked_at = now
        is_free = self.live is None and self.fault is None and self.doubtful is None
        # Between two of them, a known answer is asked.
        if is_free and self.known and self._waiting and not self._was_live:
            self._live_since, self.live = self._waiting.popleft()
            self._after_live, self.number = self.number, LIVE
        self._was_live = self.number == LIVE
        return self.number

    def hear(self, checked: Checked, now: float) -> bool:
        """Draw conclusions; return whether its answers are now wrong, or right again."""
        self.asked_at = None
        if checked.load_number != self.load_number:
            return False
        self.known, self.problem = checked.known, checked.problem
        # What it worked on was this.
        self._looked = None
        if checked.problem or checked.unjudged:
            self._forget_live()
        if checked.problem:
            self.next_at = now + LATER
            return False
        if checked.unjudged:
            self.unjudged = checked.unjudged
            self.next_at = now + max(INTERVAL, checked.took / SHARE)
            return False
        self.checks += 1
        if self.number == LIVE:
            self.judged, self.unjudged = self.judged + 1, ""
        soon, share = (INTERVAL, SHARE) if self.fault is None else (AGAIN, SHARE_IN_FAULT)
        self.next_at = now + max(soon, checked.took / share)
        if checked.fault is None:
            return self._pass(now)
        self.passed = 0
        if self.fault is not None or self.doubtful is not None:
            is_new, self.fault = self.fault is None, checked.fault
            self.faults += is_new
            self._waiting.clear()
            self._after_live = 0
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
        was_live = self.number == LIVE
        self._go_on()
        self.passed += 1
        if self.fault is None:
            if was_live:
                self._forget_live()
            return False
        if self.passed < self.known + (self.live is not None):
            return False
        self.fault = None
        self._forget_live()
        return True

    def _go_on(self) -> None:
        self.doubtful, self.number = None, self._other

    def _forget_live(self) -> None:
        if self.live is None:
            return
        if LIVE in (self.number, self.doubtful):
            self.number, self.doubtful = self._after_live, None
        self.live = None

    @property
    def _other(self) -> int:
        if self.number == LIVE:
            return self._after_live
        following = self.number + 1
        if following < self.known:
            return following
        return LIVE if self.live is not None and self.fault is not None else 0

    def report(self) -> CertificateReport:
        return CertificateReport(
            self.known, self.checks, self.faults, self.fault, int(self.fault is not None),
            self.problem, self.judged, self.unjudged,
        )  # fmt: skip
