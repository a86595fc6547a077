"""Keeps Tritons, their models and their frontends as they are desired: look, decide, act, again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal, cast

from llmserve.contract.live_answer import LiveAnswer
from llmserve.contract.report import FrontendReport, ModelReport, ReplicaReport, State
from llmserve.errors import NotLoadedError, ServerError, reason
from llmserve.names import near
from llmserve.repository.repository import Model, Repository
from llmserve.server.keep.act import Actor
from llmserve.server.keep.answer_checks import offer_answer
from llmserve.server.keep.decide import AllReplicas, decide, decide_wishes
from llmserve.server.keep.demand import Demand
from llmserve.server.keep.desired import Desired, Hold, OnDemand, Order
from llmserve.server.keep.live_answers import with_adapter_files
from llmserve.server.keep.memory import FrontendMemory, Memory, TritonMemory
from llmserve.server.keep.observe import (
    CHECK_INTERVAL,
    FrontendHandle,
    FrontendObserver,
    FrontendTimes,
    RunningTriton,
    TritonObserver,
)
from llmserve.server.keep.picture import Picture
from llmserve.server.keep.reading_ahead import is_reading
from llmserve.server.keep.sizes import Sizes
from llmserve.server.keep.states import Watch
from llmserve.server.run.frontend import RunningFrontend
from llmserve.server.server import Server
from llmserve.server.settings import ServerSettings

_SOON = CHECK_INTERVAL / 5
"""Seconds between two looks while somebody waits for what they show."""
_PATIENCE = 60.0
"""Seconds for which supervision may fail before it ends the server."""


class Reconciler:
    """Keeps servers that were started with ``settings``, including their log files.

    Made on a running loop. Whoever has one calls :meth:`step` again and again, after :meth:`wait`.
    Without ``asks_for_tokens``, its models get no requests that show whether they answer.
    """

    def __init__(
        self,
        settings: Sequence[ServerSettings],
        servers: Sequence[Server],
        notify: Callable[[str], None],
        frontends: Sequence[RunningFrontend] = (),
        on_demand: OnDemand | None = None,
        offered: Sequence[str] = (),
        times: FrontendTimes | None = None,
        *,
        asks_for_tokens: bool = True,
    ) -> None:
        now = time.monotonic()
        self.desired = Desired()
        self._awake = asyncio.Event()
        self.tritons = [RunningTriton(*each) for each in zip(settings, servers, strict=True)]
        memories = [_remember(number, each, now) for number, each in enumerate(self.tritons)]
        self.memory = Memory(memories)
        for triton in memories:
            triton.is_said = len(memories) > 1
            for name in offered:
                if name not in triton.models:
                    triton.add(name, State.UNLOADED, now)
        if on_demand is not None:
            self.memory.demand = Demand(offered, on_demand, now)
        self.frontends = [FrontendHandle(running) for running in frontends]
        self.memory.frontends = [
            FrontendMemory(
                each.running.frontend.name, self.memory.lines.append, State.READY, since=now,
                number=number,
            )
            for number, each in enumerate(self.frontends)
        ]  # fmt: skip
        self._observers = [
            TritonObserver(running, memory, self._awake.set, asks_for_tokens=asks_for_tokens)
            for running, memory in zip(self.tritons, memories, strict=True)
        ]
        self._front_observers = [
            FrontendObserver(*each, times or FrontendTimes())
            for each in zip(self.frontends, self.memory.frontends, strict=True)
        ]
        self._sizes = Sizes(self.tritons, memories) if on_demand is not None else None
        self._actor = Actor(self.tritons, self.frontends, notify, self._awake.set)
        self._picture = Picture(now)
        self._notify = notify
        self._fails_since: float | None = None
        self._is_stopping = False

    # The loop

    def step(self) -> None:
        """Look, decide and act once.

        Models answer while this fails for a reason that nobody has foreseen, so it is tried again;
        it raises only once it has failed for a minute.
        """
        self._awake.clear()
        try:
            self._picture = self._look()
            self._actor.act(decide(self.desired, self._picture, self.memory))
            self._forget_done()
        except Exception as error:
            now = time.monotonic()
            if self._fails_since is None:
                self._fails_since = now
                self._notify(f"note: supervision failed, and is tried again: {reason(error)}")
            if now - self._fails_since > _PATIENCE:
                raise
        else:
            self._fails_since = None

    async def wait(self) -> None:
        """Wait until there may be something to see."""
        with suppress(asyncio.TimeoutError):
            interval = _SOON if self.memory.is_about_to_end else CHECK_INTERVAL
            await asyncio.wait_for(self._awake.wait(), interval)

    async def settle(self) -> None:
        """End what is under way in the background, so that nothing outlives the servers."""
        self._is_stopping = True
        for hold in self.desired.holds:
            hold.refuse(NotLoadedError("the server is stopping"))
        error = ServerError("Triton has ended", hint="see `llmserve status`")
        for order in self.desired.orders:
            if not order.done.done():
                order.done.set_exception(error)
        await asyncio.gather(
            *(observer.close() for observer in self._observers),
            *(observer.close() for observer in self._front_observers),
        )
        await self._actor.settle()

    def _look(self) -> Picture:
        now = time.monotonic()
        offered = self.memory.demand.offered if self.memory.demand else []
        tritons = tuple(observer.look(now, offered) for observer in self._observers)
        frontends = tuple(observer.look(now) for observer in self._front_observers)
        if self._sizes is None:
            return Picture(now, tritons, frontends)
        self._sizes.look(list(dict.fromkeys([*offered, *self._wanted()])), now)
        return Picture(now, tritons, frontends, self._sizes.parts(), self._sizes.sizes())

    def _wanted(self) -> list[str]:
        return [order.model for order in self.desired.orders]

    def _consider_wishes(self) -> None:
        """Decide about who has come or gone at once, by the last picture."""
        if not self._is_stopping and len(self._picture.tritons) == len(self.tritons):
            before, picture = self.memory.changes, replace(self._picture, now=time.monotonic())
            self._actor.act(decide_wishes(self.desired, picture, self.memory))
            self._forget_done()
            if self.memory.changes != before:
                self._awake.set()

    def _forget_done(self) -> None:
        self.desired.orders = [each for each in self.desired.orders if not each.done.done()]

    # What is asked of it

    async def order(self, do: str, name: str) -> None:
        """Load, reload or unload a model, and return when that is done; raise why it is not."""
        parts = await self._check(do, name)
        done = asyncio.get_running_loop().create_future()
        kind = cast(Literal["load", "reload", "unload"], do)
        self.desired.orders.append(Order(kind, name, parts, done))
        self._awake.set()
        await done

    async def _check(self, do: str, name: str) -> tuple[str, ...]:
        """Return the parts of a model; refuse one that is not there or cannot be read.

        Triton would be restarted for nothing, which would also interrupt the other models
        (workarounds.UNREADABLE).
        """
        from llmserve.repository.check import check_repository

        settings, demand = self.tritons[0].settings, self.memory.demand
        # Read again: the model may be new, or built anew.
        repository = Repository.open(settings.repository)
        if demand is not None and name not in demand.offered and name in repository.models:
            owner = repository.owner_of(name)
            if owner in repository.models:
                raise ServerError(f"{name} is a part of {owner}", hint=f"{do} {owner}")
        if do == "unload":
            return ()
        if name not in repository.models:
            hint = near(name, repository.models)
            raise ServerError(f"no model {name!r} in {repository.path}", hint=hint)
        here = settings.runtime == "embedded"
        check = partial(check_repository, models=[name], quick=True, served_here=here)
        for problem in await asyncio.to_thread(check, repository):
            if problem.fatal:
                raise ServerError(str(problem))
        return repository.parts_of(name)

    @property
    def is_changing(self) -> bool:
        """Whether a model is being loaded or unloaded, or what failed is taken back."""
        return bool(self.memory.changes)

    @property
    def is_on_demand(self) -> bool:
        return self.memory.demand is not None

    def hold(
        self, name: str, *, load: bool = True, priority: int = 0, keep: float | None = None
    ) -> Hold:
        """Ask for a model, which stays until :meth:`release`; without ``load``, if it is loaded."""
        hold = Hold(name, asyncio.get_running_loop().create_future(), load, priority, keep)
        self.desired.holds.append(hold)
        if self._is_stopping:
            hold.refuse(NotLoadedError("the server is stopping"))
        else:
            self._consider_wishes()
        return hold

    def release(self, hold: Hold) -> None:
        """End a hold, or the wait for it."""
        self.desired.holds.remove(hold)
        if not hold.granted.done():
            hold.granted.cancel()
        self._consider_wishes()

    def judge(self, answer: LiveAnswer) -> None:
        """Have an answer to a user judged by the model that has given it, once that is idle."""
        model = Model(self.tritons[0].settings.repository / answer.model)
        if (known := with_adapter_files(answer, model, time.time())) is None:
            return
        for running, memory in zip(self.tritons, self.memory.tritons, strict=True):
            if running.server.grpc_url == known.url or len(self.tritons) == 1:
                offer_answer(memory, known, time.monotonic())

    # What it says

    @property
    def alive(self) -> bool:
        """Whether any Triton is expected to answer."""
        return any(triton.triton.alive for triton in self.memory.tritons)

    @property
    def has_failed(self) -> bool:
        """Whether nothing that could answer is left."""
        return all(triton.has_failed for triton in self.memory.tritons)

    def why_it_failed(self) -> set[str]:
        """Return what has died too often, or cannot be loaded, and why."""
        return {why for triton in self.memory.tritons for why in triton.why_it_failed()}

    @property
    def servers(self) -> list[Server]:
        """The servers that it keeps; others after a restart."""
        return [running.server for running in self.tritons]

    @property
    def went_wrong(self) -> list[str]:
        """What has ended that should not have, so that the logs are worth reading."""
        watches: list[Watch] = [*self.memory.frontends]
        for triton in self.memory.tritons:
            watches += [triton.triton, *triton.models.values()]
        return [watch.in_words() for watch in watches if watch.went_wrong]

    def last_lines(self) -> list[str]:
        """Return the last lines of the logs."""
        return [line for running in self.tritons for line in running.log.tail]

    def reports(self) -> list[ReplicaReport]:
        """Return the states of each Triton and of its models."""
        return [
            self._report(*each)
            for each in zip(self.tritons, self.memory.tritons, self._observers, strict=True)
        ]

    def report(self) -> ReplicaReport:
        """Return the states of the first Triton and of its models."""
        return self.reports()[0]

    def frontend_reports(self) -> tuple[FrontendReport, ...]:
        pairs = zip(self.frontends, self.memory.frontends, strict=True)
        return tuple(
            FrontendReport(
                each.name, each.state, each.why, each.restarts, each.code, url=handle.running.url
            )
            for handle, each in pairs
        )

    def with_demand(self, model: ModelReport) -> ModelReport:
        """Add to a report what is known of a model on demand."""
        if self.memory.demand is None or self._sizes is None:
            return model
        models = AllReplicas(self.memory.tritons, self._picture.sizes)
        demand = self.memory.demand.report(model.name, models, time.monotonic())
        if demand is None:
            return model
        task, adapters = self._sizes.task(model.name), self._sizes.adapters(model.name)
        return replace(model, demand=replace(demand, task=task, adapters=adapters))

    def _report(
        self, running: RunningTriton, memory: TritonMemory, observer: TritonObserver
    ) -> ReplicaReport:
        server, triton = running.server, memory.triton
        models = (
            replace(
                model.report(),
                loads=running.load_number(model.name),
                failing=observer.failing(model.name),
                fingerprint=running.files(model.name).fingerprint,
                certificate=model.certificate.report() if memory.certifies else None,
                reading=is_reading(memory, model.name, running.load_number(model.name)),
            )
            for model in memory.models.values()
        )
        return ReplicaReport(
            triton.state, server.grpc_url, server.http_url, server.runtime, str(server.log_file),
            triton.restarts, triton.why, tuple(models),
        )  # fmt: skip


def _remember(number: int, running: RunningTriton, now: float) -> TritonMemory:
    """Return what there is to remember of a Triton that has just been started."""
    settings, server = running.settings, running.server
    memory = TritonMemory(
        number, settings.repository, server.renewable, settings.on_demand, settings.ready_timeout,
        settings.certify, frozenset(settings.warm_prompts),
    )  # fmt: skip
    memory.triton.since = now
    repository = Repository.open(settings.repository)
    for name, state in server.models().items():
        if state == "READY":
            memory.add(name, State.READY, now, repository.parts_of(name))
    for name, why in server.failures.items():
        memory.add(name, State.FAILED, now, repository.parts_of(name)).why = why
    return memory
