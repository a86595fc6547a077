"""Keeps one Triton and its models alive.

Triton reloads a failed model while it keeps serving the others. If that does not help, or if Triton
itself has ended, Triton is restarted with all models. The states are in
:mod:`llmserve.server.keep.states`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from llmserve.contract.report import ReplicaReport
from llmserve.errors import ServerError, reason
from llmserve.repository.repository import Repository
from llmserve.server.keep.detect import Detector
from llmserve.server.keep.health import INTERVAL, SLOW, Monitor
from llmserve.server.keep.kept import Kept, KeptModel
from llmserve.server.keep.orders import Orders
from llmserve.server.keep.reload import Reloader
from llmserve.server.keep.restart import Restarter
from llmserve.server.keep.shelf import Shelf
from llmserve.server.run.activity import Activity
from llmserve.server.server import Server
from llmserve.server.settings import ServerSettings

if TYPE_CHECKING:
    from llmserve.client import AsyncClient

_AGAIN = 1.0
"""Seconds until a Triton that has not answered is asked again."""
_SILENT = 5.0
"""Seconds after which a Triton that does nothing either is silent."""


class Keeper:
    """Keeps a server that was started with ``settings``, including its log file.

    Made on a running loop. Whoever has one calls :meth:`check` every ``CHECK_INTERVAL`` seconds.
    """

    def __init__(
        self, settings: ServerSettings, server: Server, notify: Callable[[str], None]
    ) -> None:
        self.kept = Kept(settings, server, notify)
        reloader = Reloader(self.kept)
        orders = Orders(self.kept, reloader)
        self.reload, self.unload, self.check_model = orders.reload, orders.unload, orders.check
        shelf = Shelf(self.kept, orders, reloader, lambda name: self._monitor.is_asking_for(name))
        self.offer, self.load, self.put_away = shelf.offer, shelf.load, shelf.put_away
        self._detector = Detector(self.kept, reloader.give_up)
        self._reloader = reloader
        self._restarter = Restarter(self.kept)
        self._client: AsyncClient | None = None
        self._monitor = Monitor(
            self._connected,
            self._asked,
            _Seen(self.kept),
            slow=SLOW,
            end_hung=self._end_processes,
        )
        self._canaries = asyncio.create_task(self._send_canaries())

    @property
    def server(self) -> Server:
        """The server that it keeps; another one after a restart."""
        return self.kept.server

    @property
    def alive(self) -> bool:
        """Whether Triton is expected to answer."""
        return self.kept.triton.alive

    def report(self) -> ReplicaReport:
        """Return the states of Triton and of its models."""
        report, failing = self.kept.report(), self._monitor.failing
        models = (replace(model, failing=failing(model.name)) for model in report.models)
        return replace(report, models=tuple(models))

    def why_it_failed(self) -> set[str]:
        """Return what has died too often, or cannot be loaded, and why."""
        return self.kept.why_it_failed()

    def check(self, now: float) -> None:
        """Detect what has happened, and start recovering from it."""
        if self._restarter.is_busy():
            return
        if not self.kept.given_up:
            self._detector.check(now)
            self._reloader.check(now)
        self._restarter.check(now)

    async def settle(self) -> None:
        """Stop the background tasks, so that none outlives the server."""
        self.kept.stopping = True
        self._canaries.cancel()
        await self._restarter.settle()
        if self._client is not None:
            await self._client.close()
            self._client = None

    def print_last_lines(self) -> None:
        for line in self.kept.log.tail:
            self.kept.notify(line)

    # Canary requests

    async def _send_canaries(self) -> None:
        triton = self.kept.triton
        while True:
            await asyncio.sleep(_AGAIN if triton.misses else INTERVAL)
            if not triton.alive:
                continue
            try:
                await self._monitor.check()
            except Exception as error:  # whatever it is, the next check is still due
                triton.missed(time.monotonic(), reason(error))
            else:
                triton.answered(time.monotonic())

    def _asked(self) -> Iterator[KeptModel]:
        models = self.kept.models
        parts = {part for model in models.values() for part in model.parts}
        return (model for name, model in models.items() if model.alive and name not in parts)

    def _connected(self) -> AsyncClient:
        if self._client is None:
            from llmserve.client import connect_async

            self._client = connect_async(self.kept.server.grpc_url)
        return self._client

    def _end_processes(self, name: str) -> None:
        """End the processes of a model that hangs: Triton never would, and clients wait for it."""
        for part in _with_parts(self.kept, name):
            self.kept.stubs.kill(part)


class _Seen:
    """What Triton's statistics and the processes of its models show."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    async def answers(self) -> Mapping[str, int]:
        """Ask Triton, with more patience while it works."""
        server = self._kept.server
        asked = asyncio.ensure_future(asyncio.to_thread(server.answers))
        # Of a container, the process here only shows what it prints.
        is_seen = self._kept.settings.runtime != "docker"
        before = Activity.of([server.pid])
        while not (await asyncio.wait({asked}, timeout=_SILENT))[0] and is_seen:
            now = Activity.of([server.pid])
            if not now.is_work_since(before):
                # Who waits for it has given up, and its error is this one.
                asked.add_done_callback(lambda task: task.cancelled() or task.exception())
                raise ServerError(f"no answer in {_SILENT:g} s, and it does nothing")
            before = now
        return await asked

    def seconds(self) -> Mapping[str, float]:
        kept = self._kept
        return {name: sum(map(kept.stubs.seconds, _with_parts(kept, name))) for name in kept.models}

    def loads(self, name: str) -> int:
        return self._kept.models[name].loads if name in self._kept.models else -1

    def has_processes(self, name: str) -> bool:
        repository, stubs = Repository.open(self._kept.settings.repository), self._kept.stubs
        names = [
            part
            for part in _with_parts(self._kept, name)
            if repository.model(part).is_python or stubs.of(part)
        ]
        return bool(names) and all(map(stubs.of, names))


def _with_parts(kept: Kept, name: str) -> tuple[str, ...]:
    model = kept.models.get(name)
    return (*(model.parts if model else ()), name)
