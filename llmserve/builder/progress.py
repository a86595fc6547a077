"""What a build reports of work that takes minutes."""

from __future__ import annotations


class Note(str):
    """A report that a user should read after the build as well: it stays on a terminal."""


class PartDone(str):
    """Words for what is being done, with the share of it that is done, from 0 to 1.

    A report of a build is a text; with this one, a terminal shows a bar and the time left.
    ``amount`` says in words how much is done, and ``left`` is how many seconds the rest takes; by
    default as many as the same share has taken.
    """

    share: float
    amount: str
    left: float | None

    def __new__(
        cls, words: str, share: float, *, amount: str = "", left: float | None = None
    ) -> PartDone:
        self = super().__new__(cls, words)
        self.share, self.amount, self.left = share, amount, left
        return self
