"""One thing that is wrong with a repository."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """What is wrong with which model, and what mends it.

    ``fatal`` problems keep the model from loading; the others are worth knowing.
    """

    model: str
    what: str
    mend: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.model}: {self.what}: {self.mend}"
