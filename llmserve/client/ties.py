"""Where two answers part, and whether rounding explains it.

Two programs that compute one model round differently, and so does one program whose batches are
not the same: either may take the other of two tokens which are nearly as likely. Going from one
answer to the other, the score of one of these tokens falls below the other's. That change is the
sum of what each answer found its own token likelier, and it is at most what the precision explains
if both are the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from llmserve.client.results import Logprob

EXPLAINED: Mapping[str, float] = {
    "float32": 0.01, "float16": 0.1, "bfloat16": 0.5, "int8": 1.0, "int4": 3.0
}  # fmt: skip
"""What a precision may explain where no model is there to measure it: a difference in logits."""


@dataclass(frozen=True)
class Preference:
    """How sure an answer was of its own token, where another took a different one."""

    margin: float | None = None
    """How much likelier it finds its own token than the other's, as a difference of
    log-probabilities; None if it does not say."""
    is_least: bool = False
    """Whether the margin is more than that: the other's token is not among its likeliest."""

    @classmethod
    def of(cls, own: Logprob, others: str) -> Preference:
        """Return how much likelier a token was found than another's text.

        An answer that takes the less likely of two tokens, as penalties have it do, prefers
        neither.
        """
        if not own.top:
            return cls()
        found = next((entry for entry in own.top if entry.token == others), None)
        least = min(entry.logprob for entry in own.top)
        margin = own.logprob - (least if found is None else found.logprob)
        return cls(max(0.0, margin), found is None)


@dataclass(frozen=True)
class Parting:
    """The first place where two answers have different tokens."""

    at: int
    one: Preference
    other: Preference

    @classmethod
    def find(cls, one: Sequence[Logprob], other: Sequence[Logprob]) -> Parting | None:
        """Return it; None if they part nowhere, or not all that both have is known."""
        for at, (ours, theirs) in enumerate(zip(one, other, strict=False)):
            if ours.token != theirs.token:
                return cls(at, Preference.of(ours, theirs.token), Preference.of(theirs, ours.token))
        return None

    @property
    def change(self) -> float | None:
        """What must have changed between the two, at least, in logits; None if it is not said."""
        if self.one.margin is None or self.other.margin is None:
            return None
        return self.one.margin + self.other.margin

    def verdict(self, explained: float) -> Literal["tie", "differs", "unexplained"]:
        """Say what it is if that much is explained; ``unexplained`` if no answer says its own."""
        if (change := self.change) is None:
            return "unexplained"
        is_tie = change <= explained and not (self.one.is_least or self.other.is_least)
        return "tie" if is_tie else "differs"
