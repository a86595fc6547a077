"""How a check ends before its end: its promise is broken, not offered, or cannot be decided."""

from __future__ import annotations

from llmserve_certify.endpoint import Ask


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
