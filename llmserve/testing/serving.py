"""A ``serve`` without processes: what gateways ask at its socket, and what it decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmserve.contract.report import ModelReport, ServerReport, State
from llmserve.errors import ServerError
from llmserve.server.keep import actions
from llmserve.server.keep.control import listening
from llmserve.server.keep.demand import Demand, LoadEverywhere, UnloadEverywhere
from llmserve.server.keep.desired import Desired, Hold, OnDemand, Order

__all__ = ["ScriptedServe", "listening"]


class ScriptedServe:
    """Loads models on demand as ``serve`` decides; ``load`` and ``unload`` may be overridden.

    What is loaded is in ``loaded`` at once, when ``gate`` is open; ``broken`` fails to load.
    """

    def __init__(self, *names: str, max_loaded: int = 1, unload_after: float | None = None) -> None:
        self.loaded: set[str] = set()
        self.history: list[str] = []
        """What was loaded (``+a``) and unloaded (``-a``)."""
        self.gate = asyncio.Event()
        self.gate.set()
        self._desired = Desired()
        self._demand = Demand(
            names, OnDemand(max_loaded, unload_after=unload_after), time.monotonic()
        )
        self._changes: dict[str, asyncio.Future[None]] = {}
        self._refused: dict[str, str] = {}

    async def load(self, name: str) -> None:
        await self.gate.wait()
        if name == "broken":
            raise ServerError("no weights")
        self.loaded.add(name)
        self.history.append(f"+{name}")

    async def unload(self, name: str) -> None:
        self.loaded.remove(name)
        self.history.append(f"-{name}")

    @asynccontextmanager
    async def listening(self, socket: Path) -> AsyncIterator[None]:
        """Answer at a socket while the block runs."""
        async with listening(socket, self._answer, {"hold": self._hold}):
            yield

    # What it decides from, as of a real server.
    is_paused = False
    has_ended = False

    def takes_memory(self, name: str) -> bool:
        return name in self.loaded

    def is_changing(self, name: str) -> bool:
        return name in self._changes

    def refused(self, name: str) -> str:
        return self._refused.get(name, "")

    def cost_restart(self, name: str) -> bool:
        del name
        return False

    def why_it_failed(self, name: str) -> str:
        del name
        return ""

    def size(self, name: str) -> float:
        del name
        return 7e6

    def _consider(self) -> None:
        """Do what is decided for who wants models."""
        for step in self._demand.decide(self._desired, self, time.monotonic()):
            match step:
                case actions.Grant(hold):
                    hold.grant()
                case actions.Inform(hold, place, going):
                    hold.change(place, going=going)
                case actions.Refuse(Hold() as hold, error):
                    hold.refuse(error)
                case actions.Refuse(Order() as order, error):
                    order.done.set_exception(error)
                case actions.Fulfil(order):
                    order.done.set_result(None)
                case LoadEverywhere(name):
                    self._refused.pop(name, None)
                    self._changes[name] = asyncio.ensure_future(self._change(name, self.load))
                case UnloadEverywhere(name):
                    self._changes[name] = asyncio.ensure_future(self._change(name, self.unload))
        self._desired.orders = [each for each in self._desired.orders if not each.done.done()]

    async def _change(self, name: str, work: Callable[[str], Awaitable[None]]) -> None:
        try:
            await work(name)
        except ServerError as error:
            self._refused[name] = error.problem
        del self._changes[name]
        self._consider()

    async def _answer(self, request: Mapping[str, Any]) -> ServerReport:
        if request["do"] in ("load", "unload"):
            done = asyncio.get_running_loop().create_future()
            self._desired.orders.append(Order(request["do"], request["model"], (), done))
            self._consider()
            await done
        models = tuple(map(self._report, self._demand.offered))
        return ServerReport(State.READY, models=models)

    def _report(self, name: str) -> ModelReport:
        state = State.READY if name in self.loaded else State.UNLOADED
        demand = self._demand.report(name, self, time.monotonic())
        assert demand is not None
        return ModelReport(name, state, loads=1, demand=replace(demand, task="generate"))

    async def _hold(self, request: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        loop = asyncio.get_running_loop()
        granted, keep = loop.create_future(), request.get("keep")
        hold = Hold(request["model"], granted, request["load"], request["priority"], keep)
        self._desired.holds.append(hold)
        self._consider()
        try:
            while True:
                hold.changed.clear()
                yield hold.report()
                await hold.changed.wait()
        finally:
            self._desired.holds.remove(hold)
            hold.granted.cancel()
            self._consider()
