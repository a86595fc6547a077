"""Calls that run at once, as many as are allowed, which Ctrl-C does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

A = TypeVar("A")


def at_once(calls: Sequence[Callable[[], A]], most: int) -> list[A]:
    """Return the results in order, or raise the first error after what has begun has ended."""
    pairs = [(Future[A](), call) for call in calls]
    left, lock, stopped = iter(pairs), threading.Lock(), threading.Event()

    def work() -> None:
        while not stopped.is_set():
            with lock:
                pair = next(left, None)
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
    try:
        results = [future.result() for future, _ in pairs]
    except Exception:
        # What still runs would be in the way of what is examined next.
        stopped.set()
        for thread in threads:
            thread.join()
        raise
    finally:
        stopped.set()
    return results
