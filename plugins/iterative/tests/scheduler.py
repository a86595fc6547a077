"""A stand-in for Triton in unit tests of the driver: a queue, and an engine without a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime import Answer, TextFormatter
from llmserve.testing import FakeRequest, make_parts
from llmserve.testing.echoes import EchoEngine
from llmserve_iterative.driver import IterativeDriver


class Picky(TextFormatter):
    """A formatter that fails on one word."""

    def format(self, answers: Sequence[Answer]) -> dict[str, npt.NDArray[Any]]:
        if any("picky" in answer.so_far for answer in answers):
            raise KeyError("picky")
        return super().format(answers)


class Clock:
    """A clock that a test sets, and that advances a little with every call."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 1e-6
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class Scheduler:
    """Reschedules returned requests as Triton does, and drops those of disconnected clients."""

    def __init__(
        self,
        *,
        burst_ms: float = 0.0,
        idle_seconds: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        formatter: TextFormatter | None = None,
    ) -> None:
        self.engine = EchoEngine(context_length=1000)
        settings = {"burst_ms": burst_ms, "idle_seconds": idle_seconds}
        self.driver = IterativeDriver(settings, Path(), clock=clock)
        self.driver.start(make_parts(self.engine, formatter=formatter or Picky({}, Path())))
        self.queue: list[FakeRequest] = []
        self._number = 0

    def send(self, text: str, *, number: int | None = None, **parameters: Any) -> FakeRequest:
        self._number += 1
        sequence = self._number if number is None else number
        request = FakeRequest(
            {"text_input": [text], "START": np.array([[True]]), "CORRID": np.array([[sequence]])},
            sequence=sequence,
            **parameters,
        )
        self.queue.append(request)
        return request

    def run(self, batch: list[FakeRequest]) -> None:
        for request in batch:
            request.rescheduled = False
            self.queue.remove(request)
        self.driver.execute(batch)
        for request in batch:
            assert request.closed != request.rescheduled, "either answered or returned, not both"
            if request.rescheduled and not request.cancelled:
                request.replace_input("START", np.array([[False]]))
                self.queue.append(request)

    def run_all(self) -> None:
        while self.queue:
            self.run(list(self.queue))

    def nothing_is_left(self) -> bool:
        return not self.engine.live and not self.driver._active
