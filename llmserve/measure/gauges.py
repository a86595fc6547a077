"""What rises and falls on ``/metrics`` while a load runs: looked at again and again.

Read once at the end, an idle machine is all that would be seen. A thread of the process that
waits for the load generators looks once a second, which costs it a few milliseconds; they are
processes of their own and do not notice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from threading import Event, Thread
from types import TracebackType

from llmserve.measure.published import fetch, read_page
from llmserve.measure.runs import Sampled

EVERY = 1.0
"""Seconds between two looks; Triton itself looks at the machine every two."""
_FIRST = 0.25
_ENDING = 1.0


class Sampler:
    """Looks at a page from when it is entered until it is left."""

    def __init__(self, url: str, models: Sequence[str], every: float = EVERY) -> None:
        self._url = url
        self._models = models
        self._every = every
        self.seen: list[tuple[float, Mapping[str, float]]] = []
        self._over = Event()
        self._thread = Thread(target=self._look, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        # A page that does not answer must not keep anybody: the thread ends with the process.
        self._thread.join(_ENDING)

    def between(self, began: float, ended: float) -> dict[str, Sampled]:
        """Describe what was seen in a window of the monotonic clock."""
        values: dict[str, list[float]] = {}
        for at, gauges in list(self.seen):
            if began <= at <= ended:
                for name, value in gauges.items():
                    values.setdefault(name, []).append(value)
        return {
            name: Sampled(sum(seen) / len(seen), max(seen), len(seen))
            for name, seen in values.items()
        }

    def _look(self) -> None:
        wait = min(_FIRST, self._every)
        while not self._over.wait(wait):
            at, wait = time.monotonic(), self._every
            text = fetch(self._url)
            gauges = read_page(text, self._models).gauges if text is not None else {}
            if gauges:
                self.seen.append((at, gauges))
            elif not self.seen:
                return
