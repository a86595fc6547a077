"""A check: one promise of a server, what it means to a user, and what comes of testing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from llmserve.certify.examination import Examination

Severity = Literal["critical", "major", "minor"]
Need = Literal["reference", "chat", "stream"]
Task = Literal["generate", "values"]
State = Literal["passed", "failed", "undecided", "skipped", "unfinished"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One promise; ``run`` raises :class:`Broken` where it does not hold.

    ``promise`` says what holds, ``meaning`` what it means to a user that it does not. ``needs``
    is what the check cannot do without. ``follows`` names checks whose failure explains one of
    this check. ``quick`` tells whether it is part of ``--quick``. ``task`` is what it is about:
    models that generate text, or those that answer with values, such as embeddings.
    """

    name: str
    severity: Severity
    promise: str
    meaning: str
    run: Callable[[Examination], None]
    needs: tuple[Need, ...] = ()
    follows: tuple[str, ...] = ()
    quick: bool = True
    task: Task = "generate"


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
