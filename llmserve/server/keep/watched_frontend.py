"""Supervises one frontend: notices that it has ended, or that it hangs, and starts it again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from llmserve.errors import LLMServeError
from llmserve.server.keep.health import INTERVAL, SLOW_FRONTEND
from llmserve.server.keep.states import State, Watch
from llmserve.server.run.frontend import RunningFrontend, start_again


@dataclass
class WatchedFrontend(Watch):
    """A frontend with its state; whoever watches it calls :meth:`check` and runs :meth:`ask`."""

    running: RunningFrontend = field(kw_only=True)
    _starting: asyncio.Task[RunningFrontend] | None = None

    def check(self, now: float) -> None:
        """Detect its end, and start it again when its wait is over."""
        if self._starting is not None:
            if self._starting.done():
                task, self._starting = self._starting, None
                try:
                    self.running = task.result()
                    self.loaded(now)
                except (LLMServeError, OSError) as error:
                    self.died(now, str(error))
        elif self.alive and self.running.process.wait(0) is not None:
            self.died(now, self.running.why_it_ended())
        elif self.state is State.RESTARTING and now >= self.restart_at:
            self.loading(now)
            self._starting = asyncio.create_task(asyncio.to_thread(start_again, self.running))

    async def ask(self, interval: float = INTERVAL, timeout: float = SLOW_FRONTEND) -> None:
        """Send it a request regularly: one that hangs still runs, but reacts to none."""
        while self.running.frontend.health:
            await asyncio.sleep(interval)
            if not self.alive:
                continue
            asked = self.running
            reacts = await asyncio.to_thread(asked.reacts, timeout)
            if asked is not self.running:
                continue
            if reacts:
                self.answered(time.monotonic())
            else:
                self.missed(time.monotonic(), f"no answer in {timeout:g} s")


def watched(running: RunningFrontend, notify: Callable[[str], None]) -> WatchedFrontend:
    return WatchedFrontend(
        running.frontend.name, notify, State.READY, since=time.monotonic(), running=running
    )
