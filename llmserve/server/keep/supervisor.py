"""Supervises Triton servers, their models and their frontends, and reports their state.

A loop checks everything several times a second, and restarts what has ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmserve.contract.report import ModelReport, ServerReport
from llmserve.errors import ClientError, ServerError
from llmserve.repository.repository import Repository
from llmserve.server.keep.control import listening
from llmserve.server.keep.demand import Demand, OnDemand
from llmserve.server.keep.keeper import Keeper
from llmserve.server.keep.kept import CHECK_INTERVAL, GONE
from llmserve.server.keep.loader import ReplicaLoader
from llmserve.server.keep.states import Watch
from llmserve.server.keep.watched_frontend import WatchedFrontend, watched
from llmserve.server.run.frontend import RunningFrontend
from llmserve.server.server import Server
from llmserve.server.settings import ServerSettings

Notify = Callable[[str], None]

_MEASURED_EVERY = 1.0
"""Seconds between two measurements of the memory of models that are loaded on demand."""
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
    _demand: Demand | None = None
    _measured_at: float = 0.0
    _gone_since: dict[str, float] = field(default_factory=dict)
    """When the folder of a model on offer was first seen to be missing."""
    _keepers: list[Keeper] = field(default_factory=list)
    _frontends: list[WatchedFrontend] = field(default_factory=list)

    @property
    def went_wrong(self) -> list[str]:
        """What has ended that should not have, so that the logs are worth reading."""
        watches: list[Watch] = [*self._frontends]
        for keeper in self._keepers:
            watches += [keeper.kept.triton, *keeper.kept.models.values()]
        return [watch.in_words() for watch in watches if watch.went_wrong]

    def run(self) -> None:
        """Run until SIGTERM or Ctrl-C, then shut down in order; a second one ends it at once.

        Raises :class:`ServerError` if nothing is left that could answer.
        """
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._end, self._second_signal = asyncio.Event(), asyncio.Event()
        self._changing = asyncio.Lock()
        self._keepers = [
            Keeper(settings, server, self._notify_of(number))
            for number, (settings, server) in enumerate(
                zip(self.settings, self.servers, strict=True), start=1
            )
        ]
        if self.on_demand is not None:
            self._loader = ReplicaLoader(self._keepers)
            for keeper in self._keepers:
                for name in self.offered:
                    keeper.offer(name)
            self._demand = Demand(self.offered, self._loader, self.on_demand, self.notify)
        self._frontends = [watched(running, self.notify) for running in self.frontends]
        self._requests = [asyncio.create_task(frontend.ask()) for frontend in self._frontends]
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        try:
            async with AsyncExitStack() as stack:
                if self.control is not None:
                    await self._listen(self.control, stack)
                while not self._end.is_set():
                    self._check(time.monotonic())
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._end.wait(), CHECK_INTERVAL)
                self.notify("stopping, requests in flight are finished first")
                await self._stop(self.settings[0].grace)
        finally:
            # After an orderly shutdown, this has nothing left to stop.
            await self._stop(0.0)

    def _signalled(self) -> None:
        (self._second_signal if self._end.is_set() else self._end).set()

    def _notify_of(self, number: int) -> Notify:
        if len(self.servers) == 1:
            return self.notify
        return lambda line: self.notify(f"replica {number}: {line}")

    def _check(self, now: float) -> None:
        for frontend in self._frontends:
            frontend.check(now)
        for keeper in self._keepers:
            keeper.check(now)
        if self._demand is not None:
            if now - self._measured_at >= _MEASURED_EVERY:
                self._measured_at = now
                self._loader.measure()
                self._withdraw_gone(self._demand, now)
            self._loader.restart(now, in_use=self._demand.is_in_use())
            self._demand.check()
        if all(keeper.kept.failed for keeper in self._keepers):
            self._give_up()

    def _withdraw_gone(self, demand: Demand, now: float) -> None:
        """Offer no more what is not loaded and has no folder, as after `llmserve remove`."""
        folder, before = self._keepers[0].kept.folder, self._gone_since
        gone = [name for name in demand.offered if not folder(name).is_dir()]
        self._gone_since = {name: before.get(name, now) for name in gone}
        for name, since in self._gone_since.items():
            if now - since > GONE:
                demand.withdraw(name)
                if name not in demand.offered:
                    for keeper in self._keepers:
                        keeper.kept.models.pop(name, None)

    def _give_up(self) -> None:
        reasons = {why for keeper in self._keepers for why in keeper.why_it_failed()}
        for keeper in self._keepers:
            keeper.print_last_lines()
        logs = ", ".join(str(keeper.server.log_file) for keeper in self._keepers)
        raise ServerError(
            f"nothing is left to serve ({'; '.join(sorted(reasons))})", hint=f"see {logs}"
        )

    # The control socket

    async def _listen(self, control: Path, stack: AsyncExitStack) -> None:
        try:
            followers = {"hold": self._hold}
            await stack.enter_async_context(listening(control, self._answer, followers))
        except OSError as error:
            # The models are loaded, and clients are served without it.
            self.notify(f"note: `llmserve reload` and others cannot reach this server: {error}")

    async def _answer(self, request: Mapping[str, Any]) -> ServerReport:
        do, name = request.get("do"), str(request.get("model"))
        if do in ("load", "reload", "unload") and self._demand is not None:
            await self._change_on_demand(self._demand, str(do), name)
        elif do in ("reload", "unload"):
            # One change at a time, and one replica after another: the others answer meanwhile.
            async with self._changing:
                for keeper in self._keepers:
                    if not keeper.kept.given_up:
                        await (keeper.reload(name) if do == "reload" else keeper.unload(name))
        elif do != "status":
            raise ServerError("the request is none of status, load, reload and unload")
        return self._report()

    async def _change_on_demand(self, demand: Demand, do: str, name: str) -> None:
        if name not in demand.offered:
            repository = Repository.open(self.settings[0].repository)
            if (owner := repository.model(name).part_of) in repository.models:
                raise ServerError(f"{name} is a part of {owner}", hint=f"{do} {owner}")
        if name not in demand.offered and do != "unload":
            # It may be new.
            if name not in repository.models:
                await demand.load(name)
            for keeper in self._keepers:
                keeper.offer(name)
            demand.offer(name)
        if do == "reload":
            # The one that is loaded goes before the new one comes.
            await self._loader.check(name)
        if do != "load":
            await demand.unload(name)
        if do != "unload":
            await demand.load(name)

    async def _hold(self, request: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        """Hold a model for who asks for it, until that has gone."""
        if self._demand is None:
            yield {"failed": "this server has all of its models loaded", "code": "not_ready"}
            return
        try:
            name, load = str(request.get("model")), bool(request.get("load", True))
            hold = self._demand.hold(name, load=load)
        except ClientError as error:
            yield {"failed": error.problem, "hint": error.hint, "code": error.code}
            return
        try:
            while True:
                hold.changed.clear()
                yield hold.report()
                await hold.changed.wait()
        finally:
            self._demand.release(hold)

    def _report(self) -> ServerReport:
        report = ServerReport.of(
            [keeper.report() for keeper in self._keepers],
            pid=os.getpid(),
            repository=str(self.settings[0].repository.resolve()),
            stopping=self._end.is_set(),
            on_demand=self._demand is not None,
            frontends=tuple(frontend.report() for frontend in self._frontends),
        )
        return replace(report, models=tuple(map(self._with_demand, report.models)))

    def _with_demand(self, model: ModelReport) -> ModelReport:
        if self._demand is None or (report := self._demand.report(model.name)) is None:
            return model
        return replace(model, demand=replace(report, task=self._loader.task(model.name)))

    # Shutdown

    async def _stop(self, grace: float) -> None:
        """Shut down in order: frontends first, so that no request is cut off."""
        shutdown = asyncio.create_task(self._shut_down(grace))
        second_signal = asyncio.create_task(self._second_signal.wait())
        await asyncio.wait({shutdown, second_signal}, return_when=asyncio.FIRST_COMPLETED)
        if not shutdown.done():
            await self._shut_down(0.0)
        await shutdown
        second_signal.cancel()

    async def _shut_down(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        self._end.set()
        for task in self._requests:
            task.cancel()
        if self._demand is not None:
            await self._demand.settle()
        await asyncio.gather(*(keeper.settle() for keeper in self._keepers))
        extra = _END_MARGIN if grace else 0.0
        stops = (asyncio.to_thread(f.running.stop, grace + extra) for f in self._frontends)
        await asyncio.gather(*stops)
        left = max(_END_MARGIN, deadline - time.monotonic()) if grace else 0.0
        stops = (asyncio.to_thread(k.server.stop, grace=left) for k in self._keepers)
        await asyncio.gather(*stops)
