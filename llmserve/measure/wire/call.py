"""What both ways of travelling have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Arrivals = list[tuple[float, bytes]]
"""Messages with the moment each came, by the monotonic clock."""

Ended = Callable[[str, str], None]
"""Hears how a call has ended: gRPC's name of the status, and what the server says."""

Cancel = Callable[[], None]
"""Gives a call up; nobody hears of it any more."""


class Broken(Exception):
    """A call that did not end well: gRPC's name of the status, and what the server says."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


def begin(work: Coroutine[Any, Any, None], ended: Ended) -> Cancel:
    """Make a call as a task of the loop, for who would rather be told than wait."""
    task = asyncio.ensure_future(work)

    def over(done: asyncio.Task[None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            ended("OK", "")
        elif isinstance(error, Broken):
            ended(error.code, error.details)
        else:
            ended("UNKNOWN", f"{type(error).__name__}: {error}")

    def cancel() -> None:
        task.cancel()

    task.add_done_callback(over)
    return cancel
