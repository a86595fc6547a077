"""What came of a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llmserve.plugin import Severity

State = Literal["passed", "failed", "undecided", "skipped", "unfinished"]


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
