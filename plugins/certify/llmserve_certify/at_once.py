"""Calls that run at once, as many as are allowed, which Ctrl-C does not wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

A = TypeVar("A")


class Late(Exception):
    """The time for calls is over; what has begun goes on, and nobody waits for it."""


def at_once(
    calls: Sequence[Callable[[], A]], most: int, seconds: float = threading.TIMEOUT_MAX
) -> list[A]:
    """Return the results in order, or raise the first error after what has begun has ended.

    If not all have ended in so many seconds, raise :class:`Late`.
    """
    until = time.monotonic() + seconds
    pairs = [(Future[A](), call) for call in calls]
    waiting, lock, stopped = iter(pairs), threading.Lock(), threading.Event()

    def work() -> None:
        while not stopped.is_set():
            with lock:
                pair = next(waiting, None)
            if pair is None:
                return
            future, call = pair
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

    # Daemons, because Python waits for all others at exit, and so Ctrl-C would.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(most, len(pairs)))]
    for thread in threads:
        thread.start()

    def left() -> float:
        return min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)

    try:
        for future, _ in pairs:
            if not wait([future], left()).done:
                raise Late
            future.result()
        return [future.result() for future, _ in pairs]
    except Exception:
        # What still runs would be in the way of what is examined next.
        stopped.set()
        for thread in threads:
            thread.join(left())
        raise
    finally:
        stopped.set()
