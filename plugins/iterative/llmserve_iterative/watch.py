"""A thread that looks after a driver while Triton has nothing for it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread


class Watch:
    """Calls a function every so often, from :meth:`start` on until it says that it is enough.

    The function and ``start`` have to run under the same lock, so that neither misses the other.
    """

    def __init__(self, look: Callable[[], bool], every: float) -> None:
        self._look, self._every = look, every
        self._ended = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="llmserve watch", daemon=True)
            self._thread.start()

    def enough(self) -> bool:
        """Let the thread end; the function returns this."""
        self._thread = None
        return False

    def stop(self) -> None:
        """End, and wait until it has."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every) and self._look():
            pass
