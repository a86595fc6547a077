"""Takes the models of one Triton up and puts them away again, as ``serve --on-demand`` needs them.

Unlike what a user unloads, what is put away stays on offer. Triton may end meanwhile and be
restarted: these functions wait until the model is in the state that they are to bring about.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from llmserve.contract.report import State
from llmserve.errors import ServerError, reason
from llmserve.server.keep.kept import CHECK_INTERVAL, Kept
from llmserve.server.keep.orders import Orders
from llmserve.server.keep.reload import Reloader
from llmserve.server.keep.work import Work
from llmserve.server.run.activity import BUSY

_IDLE_SECONDS, _IDLE_WITHIN = 0.3, 12.0
"""For how long a model must not compute before it is unloaded, and how long that is waited for."""
_TRIES = 3
"""How often a load is tried whose process did not respond to Triton for a second."""


class Shelf:
    """The models of ``kept`` that are on offer.

    ``has_canary`` tells whether a model has a request of this process to answer.
    """

    def __init__(
        self, kept: Kept, orders: Orders, reloader: Reloader, has_canary: Callable[[str], bool]
    ) -> None:
        self._kept = kept
        self._orders = orders
        self._reloader = reloader
        self._has_canary = has_canary

    def offer(self, name: str) -> None:
        """List a model that is not loaded."""
        if name not in self._kept.models:
            self._kept.models[name] = self._kept.watched(name, State.UNLOADED)

    async def load(self, name: str) -> None:
        """Load a model and its parts; raise why if that fails."""
        kept, tries = self._kept, 0
        while True:
            await self._wait_for_triton()
            if kept.models[name].alive:
                # A Triton that was restarted meanwhile has loaded it.
                break
            server = kept.server
            try:
                tries += 1
                await self._reload(name)
                break
            except (ServerError, OSError) as error:
                # One of the system: Triton is told by files, for which there may be no place.
                if kept.stopping or kept.given_up:
                    raise
                if kept.server is server and kept.triton.alive:
                    did_not_respond = not kept.log.unhealthy.isdisjoint(self._names(name))
                    await self._take_back(
                        name, error.problem if isinstance(error, ServerError) else reason(error)
                    )
                    if did_not_respond and tries < _TRIES:
                        # It is not the model's fault if the machine has too much to do (GIVEN_UP).
                        kept.notify(f"{name}: is loaded again, since it did not respond")
                        continue
                    raise
                await self._wait_for_triton()
                if kept.models[name].state is State.FAILED:
                    raise ServerError(kept.models[name].why) from None
        await self._wait_until_ready(name)

    def _names(self, name: str) -> tuple[str, ...]:
        return (name, *self._kept.models[name].parts)

    async def _reload(self, name: str) -> None:
        kept, seconds = self._kept, self._kept.settings.ready_timeout
        try:
            await asyncio.wait_for(self._orders.reload(name), seconds)
        except asyncio.TimeoutError:
            # Triton loads nothing else before that.
            now, why = time.monotonic(), f"it was not loaded within {seconds:g} s"
            kept.models[name].failed(now, why)
            kept.models[name].cost_restart = True
            kept.want_restart(now, f"Triton waits for {name}")
            raise ServerError(why) from None

    async def put_away(self, name: str) -> None:
        """Unload a model that nobody uses, and its parts, and return when their memory is free."""
        kept = self._kept
        await self._wait_for_triton()
        model, server = kept.models[name], kept.server
        names = (name, *kept.own_parts(name))
        # From now on, it gets no canaries, and a Triton that is restarted does not load it.
        model.unloaded(time.monotonic())
        model.served = False
        for part in names[1:]:
            kept.models.pop(part, None)
        work = Work(kept, names)
        await self._wait_until_idle(names, work)
        await self._orders.wait_until_loaded(names)
        await self._orders.drop(server, names, work)
        await self._orders.wait_until_ended(names, work)

    async def _take_back(self, name: str, why: str) -> None:
        """Have nothing of a model that failed to load take memory."""
        kept, now = self._kept, time.monotonic()
        model, server = kept.models[name], kept.server
        if model.state is not State.FAILED:
            # The log may have been read since the last check, which would have given it up.
            model.failed(now, why)
            self._reloader.give_up(model)
        parts = kept.own_parts(name)
        names = (name, *parts)
        await self._orders.wait_until_loaded(parts)
        for part in parts:
            if (state := kept.models.pop(part, None)) is None:
                continue
            if state.state is State.FAILED:
                self._reloader.give_up(state)
            elif kept.server is server:
                server.drop(part)
        await self._reloader.wait_until_given_up()
        await self._orders.wait_until_ended(names, Work(kept, names))

    # Waits

    async def _wait_for_triton(self) -> None:
        kept = self._kept
        while not kept.triton.alive:
            if kept.given_up or kept.stopping:
                raise ServerError("Triton has ended", hint="see `llmserve status`")
            await asyncio.sleep(CHECK_INTERVAL)

    async def _wait_until_ready(self, name: str) -> None:
        """The log says a moment earlier that a model is loaded than it takes requests."""
        kept = self._kept
        model = kept.models[name]
        while kept.triton.alive and (model.alive or model.state is State.LOADING):
            if model.alive and await asyncio.to_thread(kept.server.takes_requests, name):
                return
            await asyncio.sleep(CHECK_INTERVAL / 5)

    async def _wait_until_idle(self, names: Sequence[str], work: Work) -> None:
        """See workarounds.UNLOADED_AT_WORK: requests of others may be about to end as well."""
        began = time.monotonic()
        while time.monotonic() - began < _IDLE_WITHIN:
            before = await work.done()
            await asyncio.sleep(_IDLE_SECONDS)
            done = await work.done()
            is_busy = done.seconds - before.seconds > BUSY * _IDLE_SECONDS
            is_busy = is_busy or done.answers != before.answers
            if not (is_busy or any(map(self._has_canary, names))):
                return
