"""A check: one promise of a server, what it means to a user, and what comes of testing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from llmserve.certify.endpoint import Ask
    from llmserve.certify.examination import Examination

Severity = Literal["critical", "major", "minor"]
Need = Literal["reference", "chat", "stream", "reason", "counts"]
State = Literal["passed", "failed", "undecided", "skipped"]
SEVERITIES: tuple[Severity, ...] = ("critical", "major", "minor")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One promise; ``run`` raises :class:`Broken` where it does not hold.

    ``promise`` says what holds, ``meaning`` what it means to a user that it does not. ``needs``
    is what the check cannot do without. ``follows`` names checks whose failure explains one of
    this check. ``quick`` tells whether it is part of ``--quick``.
    """

    name: str
    severity: Severity
    promise: str
    meaning: str
    run: Callable[[Examination], None]
    needs: tuple[Need, ...] = ()
    follows: tuple[str, ...] = ()
    quick: bool = True


class Outcome(Exception):
    """Ends a check before its end; the message is one line for its user."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.words = words


class Broken(Outcome):
    """The promise does not hold: what was expected, what came, and the request that shows it."""

    def __init__(
        self, words: str, *, expected: object = None, got: object = None, ask: Ask | None = None
    ) -> None:
        super().__init__(words)
        self.expected, self.got, self.ask = expected, got, ask
        self.curl = ""

    def with_curl(self, curl: str) -> Broken:
        """Give the command line that repeats a request which ``ask`` cannot say."""
        self.curl = curl
        return self


class NotOffered(Outcome):
    """The server does not offer what the check is about, and says so."""


class Undecided(Outcome):
    """What came may be a fault or not; the words say what would decide it."""


class OutOfBudget(Outcome):
    """No more requests or minutes are left."""


@dataclass(frozen=True)
class Verdict:
    """What came of a check."""

    name: str
    state: State
    severity: Severity
    promise: str
    meaning: str
    words: str = ""
    expected: str | None = None
    got: str | None = None
    curl: str = ""
    notes: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    cause: str = ""
    """The failed check that explains this failure."""
    requests: int = 0
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        """Whether this is a failure that no other explains."""
        return self.state == "failed" and not self.cause
