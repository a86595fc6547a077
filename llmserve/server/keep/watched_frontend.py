"""Supervises one frontend: notices that it has ended, or that it hangs, and starts it again."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from llmserve.contract.report import FrontendReport, State
from llmserve.errors import LLMServeError
from llmserve.server.keep.health import INTERVAL, SLOW_FRONTEND
from llmserve.server.keep.states import Watch
from llmserve.server.run.activity import Stops
from llmserve.server.run.frontend import RunningFrontend, start_again

_PATIENCE = 60.0
"""Seconds for which a frontend may work without any answer."""
_MAX_WAIT, _DEATHS_WINDOW = 60.0, 900.0


@dataclass
class WatchedFrontend(Watch):
    """A frontend with its state; whoever watches it calls :meth:`check` and runs :meth:`ask`."""

    running: RunningFrontend = field(kw_only=True)
    _starting: asyncio.Task[RunningFrontend] | None = None
    _stops: Stops = field(default_factory=Stops)
    _silent_since: float | None = None
    """When it was first asked for what it has not answered since."""

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
        elif self.alive and self._stops.check([self.running.process.pid], now):
            self.died(now, "it is stopped, by a signal")
        elif self.state is State.RESTARTING and now >= self.restart_at:
            self.loading(now)
            self._starting = asyncio.create_task(asyncio.to_thread(start_again, self.running))

    async def ask(
        self,
        interval: float = INTERVAL,
        timeout: float = SLOW_FRONTEND,
        patience: float = _PATIENCE,
    ) -> None:
        """Send it a request regularly: one that hangs still runs, but reacts to none.

        One that works meanwhile does not hang, unless that goes on for longer than ``patience``.
        """
        while self.running.frontend.health:
            await asyncio.sleep(interval)
            if not self.alive:
                continue
            asked = self.running
            before = await asyncio.to_thread(asked.activity)
            reacts = await asyncio.to_thread(asked.reacts, timeout)
            if asked is not self.running:
                continue
            now, why = time.monotonic(), f"no answer in {timeout:g} s"
            if reacts:
                self.answered(now)
                self._silent_since = None
                continue
            if self._silent_since is None:
                self._silent_since = before.at
            works = (await asyncio.to_thread(asked.activity)).is_work_since(before)
            if works and now - self._silent_since < patience:
                self.works(now, f"{why}, while it works")
            else:
                self.missed(now, why)

    def report(self) -> FrontendReport:
        return FrontendReport(
            self.name, self.state, self.why, self.restarts, self.code, url=self.running.url
        )

    def loaded(self, now: float) -> None:
        self._silent_since = None
        super().loaded(now)


def watched(running: RunningFrontend, notify: Callable[[str], None]) -> WatchedFrontend:
    """Return a frontend that is started again as often as it ends, if need be once a minute.

    Without it, a ``serve`` that runs would serve nobody.
    """
    return WatchedFrontend(
        running.frontend.name, notify, State.READY, since=time.monotonic(), running=running,
        deaths=math.inf, deaths_window=_DEATHS_WINDOW, max_wait=_MAX_WAIT,
    )  # fmt: skip
