"""How many tokens of prompts a step may read, so that nobody waits long for the next."""

from __future__ import annotations

_ANSWERS_WAIT = 0.5
"""The seconds that a step may take while answers wait for it: no gap in a stream is longer."""
_NEWCOMERS_WAIT = 2.0
"""The same where only a new or a cancelled request might wait: longer pieces are read faster."""
_LEAST = 64
"""The tokens that a step reads in any case, and before one has been measured.

Fewer take hardly less time: each step also reads all weights, and all keys and values before them.
"""


class Pace:
    """How many tokens a step may read, at most ``most``, as far as earlier steps tell.

    The time of a step is counted for its tokens, with what it would have taken without any. So the
    estimate is never too high, and better the more of a step is allowed.
    """

    def __init__(self, most: int) -> None:
        self.most = max(1, most)
        self._rate: float | None = None

    @property
    def rate(self) -> float | None:
        """Tokens in a second, if that was measured."""
        return self._rate

    def tokens(self, *, answers_wait: bool) -> int:
        allowed = _LEAST
        if self._rate is not None:
            allowed = int(self._rate * (_ANSWERS_WAIT if answers_wait else _NEWCOMERS_WAIT))
        return min(self.most, max(_LEAST, allowed))

    def measured(self, tokens: int, seconds: float) -> None:
        """Count a step that has read so many tokens of prompts."""
        # Of few tokens, it says little.
        if tokens >= _LEAST:
            self._rate = tokens / max(seconds, 1e-9)
