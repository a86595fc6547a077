"""The time that a request has, over all of its messages."""

from __future__ import annotations

import time

from llmserve.errors import UsageError

PATIENCE = 10.0
"""Seconds for what a server answers at once, where no timeout is named."""
ENDING_PATIENCE = 60.0
"""Seconds that a sequence's end may wait on the server, behind the step that it follows."""
ENDING_WAIT = 0.25
"""Seconds to wait for it here, so that it is on its way and a deadline still means something."""
CLOSING_WAIT = 5.0
"""Seconds that closing a client waits for such ends."""


class Deadline:
    """Counts from when it is made; ``None`` seconds means that there is no end.

    >>> Deadline(None).left() is None
    True
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not seconds > 0:
            raise UsageError(f"a timeout of {seconds} cannot be meant", mend="give seconds above 0")
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Say how many seconds are left, 0 when it is over."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())
