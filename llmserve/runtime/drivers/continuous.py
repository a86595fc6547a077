"""Continuous batching in a separate thread per model.

``execute`` queues Triton's requests and returns at once. The thread runs steps as long as a
request is in flight: new requests join before the next step, and answers are sent through the
requests' own senders. It drives any generator of mode ``"step"``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from llmserve.runtime.drivers.job import Job, begin
from llmserve.runtime.drivers.steps import JobRunner
from llmserve.runtime.errors import RequestError
from llmserve.runtime.protocols import Parts

# How often Triton is asked whether clients are still connected.
_CANCEL_INTERVAL = 0.2
# How often an idle model looks whether a constraint is ready.
_PENDING_INTERVAL = 0.002


class ContinuousDriver:
    """Answers requests from its own thread, with a generator of mode ``"step"``."""

    has_thread = True

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del settings, folder
        self._arrived: SimpleQueue[tuple[Job, float] | None] = SimpleQueue()
        self._pending: list[tuple[Job, float]] = []
        """Requests whose constraints are not ready yet; the others do not wait for them."""
        self._active: dict[Job, float] = {}
        """The requests in flight, each with the earliest time to send its next piece."""

    def start(self, parts: Parts) -> None:
        self._parts, self._runner = parts, JobRunner(parts, time.monotonic())
        self._unloaded = Event()
        self._threads = [
            Thread(target=self._run, name=f"{parts.name}-steps", daemon=True),
            Thread(target=self._watch, name=f"{parts.name}-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Read requests and queue them for the thread, without waiting for their answers."""
        for job in begin(requests, self._parts, eager=False):
            self._arrived.put((job, time.monotonic()))

    def is_ready(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def finalize(self) -> None:
        """End the threads; requests in flight get an error."""
        self._unloaded.set()
        self._arrived.put(None)
        for thread in self._threads:
            thread.join()
        self._runner.close()

    def _run(self) -> None:
        while self._take_arrived():
            for generation, error in self._runner.step(self._active):
                for job in self._active:
                    if generation in job.generations:
                        self._runner.give_up(job, error)
            now = time.monotonic()
            self._send(now)
            self._runner.metrics.publish(now, at_once=not self._active)

    def _watch(self) -> None:
        """Look for disconnected clients; while all cores compute, one check takes 0.5 ms."""
        while not self._unloaded.wait(_CANCEL_INTERVAL):
            for job in [*list(self._active), *(job for job, _ in list(self._pending))]:
                job.responder.cancelled(now=True)

    def _take_arrived(self) -> bool:
        """Admit new requests, waiting while none is in flight; return False when unloading."""
        while True:
            self._admit_pending()
            timeout = _PENDING_INTERVAL if self._pending else None
            try:
                arrived = self._arrived.get(block=not self._active, timeout=timeout)
            except Empty:
                if self._active:
                    return True
                continue
            if arrived is None:
                for job in [*self._active, *(job for job, _ in self._pending)]:
                    self._runner.give_up(job, RuntimeError("the model is being unloaded"))
                return False
            self._pending.append(arrived)

    def _admit_pending(self) -> None:
        # A client that has gone needs no constraint.
        ready = [item for item in self._pending if item[0].responder.gone or not item[0].pending]
        if ready:
            self._pending = [(job, at) for job, at in self._pending if (job, at) not in ready]
        for job, at in ready:
            if job.responder.gone:
                self._runner.give_up(
                    job, RequestError("the request was cancelled", code="cancelled")
                )
            elif self._runner.admit(job):
                self._active[job] = 0.0
                self._runner.metrics.began(job, at)

    def _send(self, now: float) -> None:
        """Send first pieces and complete answers at once, other pieces at a steady pace."""
        interval = self._runner.interval(self._active)
        for job, next_piece in self._active.items():
            if job.responder.gone:
                self._runner.cancel(job)
            if self._runner.send_news(job, now, next_piece):
                self._active[job] = now + interval
        self._runner.flush(now)
        for job in [job for job in self._active if job.responder.closed]:
            # A request whose response Triton could not accept is closed but not done.
            self._runner.drop(job)
            del self._active[job]
