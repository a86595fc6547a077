"""Models on offer, of which another class says how they are loaded and unloaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

from llmserve.contract.report import OnDemandReport
from llmserve.errors import LLMServeError, ServerError
from llmserve.server.keep import actions
from llmserve.server.keep.demand import Demand, LoadEverywhere, Step, UnloadEverywhere
from llmserve.server.keep.desired import Desired, Hold, OnDemand, Order


class Loader(Protocol):
    """Loads and unloads models."""

    loaded: set[str]

    @property
    def is_paused(self) -> bool: ...
    def why_it_failed(self, name: str) -> str: ...
    def size(self, name: str) -> float: ...
    def cost_restart(self, name: str) -> bool: ...
    async def load(self, name: str) -> None: ...
    async def unload(self, name: str) -> None: ...


class Offered:
    """Does at once what is decided for who wants models."""

    is_on_demand = True

    def __init__(
        self,
        names: Iterable[str],
        loader: Loader,
        settings: OnDemand,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.desired = Desired()
        self.demand = Demand(names, settings, clock())
        self._loader = loader
        self._clock = clock
        self._changes: dict[str, asyncio.Future[None]] = {}
        self._refused: dict[str, str] = {}

    # What is known of the models

    has_ended = False

    @property
    def is_paused(self) -> bool:
        return self._loader.is_paused

    def takes_memory(self, name: str) -> bool:
        return name in self._loader.loaded

    def is_changing(self, name: str) -> bool:
        return name in self._changes

    def refused(self, name: str) -> str:
        return self._refused.get(name, "")

    def why_it_failed(self, name: str) -> str:
        return self._loader.why_it_failed(name)

    def size(self, name: str) -> float:
        return self._loader.size(name)

    def cost_restart(self, name: str) -> bool:
        return self._loader.cost_restart(name)

    # What is asked

    def hold(
        self, name: str, *, load: bool = True, priority: int = 0, keep: float | None = None
    ) -> Hold:
        hold = Hold(name, asyncio.get_running_loop().create_future(), load, priority, keep)
        self.desired.holds.append(hold)
        self.check()
        return hold

    def release(self, hold: Hold) -> None:
        self.desired.holds.remove(hold)
        hold.granted.cancel()
        self.check()

    async def order(self, do: Literal["load", "reload", "unload"], name: str) -> None:
        order = Order(do, name, (), asyncio.get_running_loop().create_future())
        self.desired.orders.append(order)
        for _ in range(2):
            self.check()
        await order.done

    async def load(self, name: str) -> None:
        await self.order("load", name)

    async def unload(self, name: str) -> None:
        await self.order("unload", name)

    def report(self, name: str) -> OnDemandReport | None:
        return self.demand.report(name, self, self._clock())

    # What is done

    def check(self) -> None:
        for step in self.demand.decide(self.desired, self, self._clock()):
            self._act(step)
        self.desired.orders = [each for each in self.desired.orders if not each.done.done()]

    def _act(self, step: Step) -> None:
        match step:
            case actions.Grant(hold):
                hold.grant()
            case actions.Inform(hold, place, going):
                hold.change(place, going=going)
            case actions.Refuse(whom, error):
                if isinstance(whom, Hold):
                    whom.refuse(error)
                else:
                    whom.done.set_exception(error)
            case actions.Fulfil(order):
                order.done.set_result(None)
            case LoadEverywhere(name):
                self._refused.pop(name, None)
                self._begin(name, self._loader.load(name))
            case UnloadEverywhere(name):
                self._begin(name, self._loader.unload(name))

    def _begin(self, name: str, work: Any) -> None:
        self._changes[name] = asyncio.ensure_future(self._change(name, work))

    async def _change(self, name: str, work: Any) -> None:
        try:
            await work
        except LLMServeError as error:
            self._refused[name] = error.problem if isinstance(error, ServerError) else str(error)
        del self._changes[name]
        self.check()
