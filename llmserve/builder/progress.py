"""What a build reports of work that takes minutes."""

from __future__ import annotations


class Note(str):
    """A report that a user should read after the build as well: it stays on a terminal."""


class PartDone(str):
    """Words for what is being done, with the share of it that is done, from 0 to 1.

    A report of a build is a text; with this one, a terminal shows a bar and the time left.
    """

    share: float

    def __new__(cls, words: str, share: float) -> PartDone:
        self = super().__new__(cls, words)
        self.share = share
        return self
