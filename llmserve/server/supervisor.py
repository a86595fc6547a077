"""Keep Tritons, their models and what stands before them in service, and tell the truth about them.

One loop looks at everything several times a second, and starts anew what is gone.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llmserve.errors import LLMServeError, ServerError
from llmserve.server.control import control_socket, listening
from llmserve.server.frontend import RunningFrontend, start_frontend
from llmserve.server.replica import LOOK, Replica
from llmserve.server.server import Server
from llmserve.server.settings import ServerSettings
from llmserve.server.states import State, Watch, best_of

Say = Callable[[str], None]

_DRAINED = 1.0
"""Seconds for a frontend to end, beside its grace."""


@dataclass
class _Front(Watch):
    running: RunningFrontend = field(kw_only=True)
    starting: asyncio.Task[RunningFrontend] | None = None


@dataclass
class Supervisor:
    """Watches over servers that have been started with ``settings``, log file included."""

    settings: Sequence[ServerSettings]
    servers: Sequence[Server]
    frontends: Sequence[RunningFrontend] = ()
    say: Say = lambda _: None
    _fronts: list[_Front] = field(default_factory=list)

    def run(self) -> None:
        """Watch until SIGTERM or Ctrl-C, and end everything in order; a second one ends it at once.

        Raises :class:`ServerError` when nothing is left that could answer.
        """
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._end, self._cut = asyncio.Event(), asyncio.Event()
        self._replicas = [
            Replica(settings, server, self._say_of(number))
            for number, (settings, server) in enumerate(
                zip(self.settings, self.servers, strict=True), start=1
            )
        ]
        self._fronts = [
            _Front(running.frontend.name, self.say, State.READY, running=running)
            for running in self.frontends
        ]
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        try:
            async with AsyncExitStack() as stack:
                try:
                    socket = control_socket(self.servers[0].grpc_url)
                    await stack.enter_async_context(listening(socket, self._answer))
                except (OSError, ServerError) as error:
                    self.say(f"note: `llmserve status` will not see this server: {error}")
                while not self._end.is_set():
                    self._look(time.monotonic())
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._end.wait(), LOOK)
                self.say("stopping, requests in flight are finished first")
                await self._stop(self.settings[0].grace)
        finally:
            # Nothing is left to stop where it has ended in order.
            await self._stop(0.0)

    def _signalled(self) -> None:
        (self._cut if self._end.is_set() else self._end).set()

    def _say_of(self, number: int) -> Say:
        if len(self.servers) == 1:
            return self.say
        return lambda line: self.say(f"replica {number}: {line}")

    def _look(self, now: float) -> None:
        for front in self._fronts:
            self._look_at_frontend(front, now)
        for replica in self._replicas:
            replica.look(now)
        if all(replica.failed for replica in self._replicas):
            self._give_up()

    def _look_at_frontend(self, front: _Front, now: float) -> None:
        if front.starting is not None:
            if front.starting.done():
                task, front.starting = front.starting, None
                try:
                    front.running = task.result()
                    front.loaded(now)
                except LLMServeError as error:
                    front.died(now, str(error))
        elif front.alive and not front.running.process.alive():
            front.died(now, front.running.why_it_ended())
        elif front.state is State.RESTARTING and now >= front.again_at:
            front.loading(now)
            old = front.running
            again = partial(start_frontend, old.frontend, old.place, old.log_file)
            front.starting = asyncio.create_task(asyncio.to_thread(again))

    def _give_up(self) -> None:
        why = {each for replica in self._replicas for each in replica.why_it_failed()}
        for replica in self._replicas:
            replica.say_last_lines()
        logs = ", ".join(str(replica.server.log_file) for replica in self._replicas)
        raise ServerError(
            f"nothing is left to serve ({'; '.join(sorted(why))})", mend=f"see {logs}"
        )

    # What others ask

    async def _answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if request.get("do") == "status":
            return self._status()
        if request.get("do") == "reload":
            # One after the other, so that the others answer meanwhile.
            for replica in self._replicas:
                if not replica.given_up:
                    await replica.reload(str(request.get("model")))
            return self._status()
        raise ServerError("a request asks for status or reload")

    def _status(self) -> dict[str, Any]:
        fronts = [{**front.report(), "url": front.running.url} for front in self._fronts]
        each = [replica.status() for replica in self._replicas]
        told = {"stopping": self._end.is_set(), "frontends": fronts}
        if len(each) == 1:
            return {**each[0], **told}
        models = [model for one in each for model in one["models"]]
        names = dict.fromkeys(model["name"] for model in models)
        best = best_of(each)
        return {
            **each[0],
            **{key: best[key] for key in ("state", "restarts")},
            "models": [best_of([m for m in models if m["name"] == name]) for name in names],
            "replicas": each,
            **told,
        }

    # The end

    async def _stop(self, grace: float) -> None:
        """End all in order: what listens before Triton first, so that nothing is cut off."""
        ending = asyncio.create_task(self._end_in_order(grace))
        cut = asyncio.create_task(self._cut.wait())
        await asyncio.wait({ending, cut}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            await self._end_in_order(0.0)
        await ending
        cut.cancel()

    async def _end_in_order(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        self._end.set()
        await asyncio.gather(*(replica.settle() for replica in self._replicas))
        extra = _DRAINED if grace else 0.0
        fronts = (asyncio.to_thread(f.running.stop, grace + extra) for f in self._fronts)
        await asyncio.gather(*fronts)
        left = max(_DRAINED, deadline - time.monotonic()) if grace else 0.0
        stops = (asyncio.to_thread(each.server.stop, grace=left) for each in self._replicas)
        await asyncio.gather(*stops)
