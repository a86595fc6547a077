"""Runs a ``serve``: its reconciler, its control socket, and its end, with a signal or without."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmserve.contract.live_answer import LiveAnswer
from llmserve.contract.report import ServerReport
from llmserve.errors import ServerError
from llmserve.server.keep.control import listening
from llmserve.server.keep.desired import OnDemand
from llmserve.server.keep.reconciler import Reconciler
from llmserve.server.run.frontend import RunningFrontend
from llmserve.server.server import Server
from llmserve.server.settings import ServerSettings

Notify = Callable[[str], None]

_END_MARGIN = 1.0
"""Seconds for a frontend to end, in addition to its grace."""


@dataclass
class Supervisor:
    """Supervises servers that were started with ``settings``, including their log files."""

    settings: Sequence[ServerSettings]
    servers: Sequence[Server]
    frontends: Sequence[RunningFrontend] = ()
    notify: Notify = lambda _: None
    control: Path | None = None
    """The control socket, on which this takes over."""
    on_demand: OnDemand | None = None
    """How to load models when they are needed, if not all at the start."""
    offered: Sequence[str] = ()
    """Which models those are."""
    _reconciler: Reconciler | None = None

    @property
    def went_wrong(self) -> list[str]:
        """What has ended that should not have, so that the logs are worth reading."""
        return self._reconciler.went_wrong if self._reconciler is not None else []

    def run(self) -> None:
        """Run until SIGTERM or Ctrl-C, then shut down in order; a second one ends it at once.

        Raises :class:`ServerError` if nothing is left that could answer.
        """
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._end, self._second_signal = asyncio.Event(), asyncio.Event()
        self._reconciler = reconciler = Reconciler(
            self.settings, self.servers, self.notify, self.frontends, self.on_demand, self.offered
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            async with AsyncExitStack() as stack:
                if self.control is not None:
                    await self._listen(self.control, reconciler, stack)
                end = asyncio.create_task(self._end.wait())
                while not self._end.is_set():
                    reconciler.step()
                    if reconciler.has_failed:
                        self._end_in_failure(reconciler)
                    waiting = asyncio.create_task(reconciler.wait())
                    await asyncio.wait({end, waiting}, return_when=asyncio.FIRST_COMPLETED)
                    waiting.cancel()
                self.notify("stopping, requests in flight are finished first")
                await self._stop(reconciler, self.settings[0].grace)
        finally:
            # After an orderly shutdown, this has nothing left to stop.
            await self._stop(reconciler, 0.0)

    def stop(self) -> None:
        """Shut down in order, as after a signal; asked for again, at once."""
        (self._second_signal if self._end.is_set() else self._end).set()

    def _end_in_failure(self, reconciler: Reconciler) -> None:
        for line in reconciler.last_lines():
            self.notify(line)
        logs = ", ".join(str(server.log_file) for server in reconciler.servers)
        reasons = "; ".join(sorted(reconciler.why_it_failed()))
        raise ServerError(f"nothing is left to serve ({reasons})", hint=f"see {logs}")

    # The control socket

    async def _listen(self, control: Path, reconciler: Reconciler, stack: AsyncExitStack) -> None:
        socket = Socket(self, reconciler)
        try:
            followers = {"hold": socket.hold}
            await stack.enter_async_context(listening(control, socket.answer, followers))
        except OSError as error:
            # The models are loaded, and clients are served without it.
            self.notify(f"note: `llmserve reload` and others cannot reach this server: {error}")

    @property
    def is_stopping(self) -> bool:
        return self._end.is_set()

    # Shutdown

    async def _stop(self, reconciler: Reconciler, grace: float) -> None:
        """Shut down in order: frontends first, so that no request is cut off."""
        shutdown = asyncio.create_task(self._shut_down(reconciler, grace))
        second_signal = asyncio.create_task(self._second_signal.wait())
        await asyncio.wait({shutdown, second_signal}, return_when=asyncio.FIRST_COMPLETED)
        if not shutdown.done():
            await self._shut_down(reconciler, 0.0)
        await shutdown
        second_signal.cancel()

    async def _shut_down(self, reconciler: Reconciler, grace: float) -> None:
        deadline = time.monotonic() + grace
        self._end.set()
        await reconciler.settle()
        extra = _END_MARGIN if grace else 0.0
        fronts = [handle.running for handle in reconciler.frontends]
        await asyncio.gather(*(asyncio.to_thread(f.stop, grace + extra) for f in fronts))
        left = max(_END_MARGIN, deadline - time.monotonic()) if grace else 0.0
        stops = (asyncio.to_thread(s.stop, grace=left) for s in reconciler.servers)
        await asyncio.gather(*stops)


@dataclass
class Socket:
    """Answers what other processes of this user ask of a ``serve``."""

    supervisor: Supervisor
    reconciler: Reconciler

    async def answer(self, request: Mapping[str, Any]) -> ServerReport:
        do = str(request.get("do"))
        if do == "load" and not self.reconciler.is_on_demand:
            do = ""
        if do in ("load", "reload", "unload"):
            await self.reconciler.order(do, str(request.get("model")))
        elif do == "judge":
            self.reconciler.judge(LiveAnswer.from_json(request.get("answer") or {}))
        elif do != "status":
            raise ServerError("the request is none of status, load, reload, unload and judge")
        return self._report()

    async def hold(self, request: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        """Hold a model for who asks for it, until that has gone."""
        if not self.reconciler.is_on_demand:
            yield {"failed": "this server has all of its models loaded", "code": "not_ready"}
            return
        name, load = str(request.get("model")), bool(request.get("load", True))
        priority = request.get("priority", 0)
        if type(priority) is not int:
            yield {"failed": "the class of a request is a whole number", "code": "not_ready"}
            return
        if (keep := request.get("keep")) is not None and type(keep) not in (int, float):
            yield {"failed": "a model is kept for a number of seconds", "code": "not_ready"}
            return
        hold = self.reconciler.hold(name, load=load, priority=priority, keep=keep)
        try:
            while True:
                hold.changed.clear()
                yield hold.report()
                await hold.changed.wait()
        finally:
            self.reconciler.release(hold)

    def _report(self) -> ServerReport:
        supervisor = self.supervisor
        report = ServerReport.of(
            self.reconciler.reports(),
            pid=os.getpid(),
            repository=str(supervisor.settings[0].repository.resolve()),
            stopping=supervisor.is_stopping,
            on_demand=self.reconciler.is_on_demand,
            frontends=self.reconciler.frontend_reports(),
        )
        return replace(report, models=tuple(map(self.reconciler.with_demand, report.models)))
