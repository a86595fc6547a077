"""Tritons that exist only as numbers: they are seen in pictures, and obey actions in their time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llmserve.contract.report import State
from llmserve.server.keep import actions
from llmserve.server.keep.actions import Action
from llmserve.server.keep.decide import decide
from llmserve.server.keep.demand import Demand
from llmserve.server.keep.desired import Desired, Hold, OnDemand, Order
from llmserve.server.keep.memory import Memory, TritonMemory
from llmserve.server.keep.picture import (
    Canary,
    Checked,
    HasRead,
    Heard,
    ModelPicture,
    Picture,
    StartPicture,
    TritonPicture,
)
from llmserve.server.run.ends import End

TICK = 0.25
STARTS_IN, LOADS_IN, DROPS_IN = 3.0, 1.5, 1.0


@dataclass
class Model:
    """What a simulated Triton has of a model."""

    processes: set[int] = field(default_factory=set)
    loading: set[int] = field(default_factory=set)
    """The processes of the load that is under way."""
    serves: bool = False
    loads_at: float | None = None
    """When the load that is under way ends."""
    loads: int = 0
    all_loads: int = 0
    failure: str = ""
    raised: str = ""
    died: End | None = None
    is_stopped: bool = False
    drops_at: float | None = None
    lingers: bool = False
    """Whether its processes do not end by themselves."""
    seconds: float = 0.0
    answers: int = 0
    withdrawn_at: float | None = None


class Triton:
    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.models: dict[str, Model] = {}
        self.ended = ""
        self.is_stopped = False
        self.is_stuck = False
        self.obeys = True
        self.starts_at: float | None = None
        self.starting: tuple[str, ...] = ()
        self.start: StartPicture | None = None
        self.heard: list[Canary] = []
        self.checked: list[tuple[float, Checked]] = []
        """When answers to checks come, and what comes."""
        self.has_read: list[tuple[float, HasRead]] = []
        """When a model has read its warm prompts, and what came of it."""
        self.started_with: list[tuple[str, ...]] = []

    def of(self, name: str) -> Model:
        return self.models.setdefault(name, Model())

    def load_number(self, name: str) -> int:
        """Return which of its loads a model has: another number after each, and after a start."""
        return 1000 * len(self.started_with) + self.of(name).all_loads

    def has(self, *names: str) -> None:
        for name in names:
            model = self.of(name)
            model.serves, model.processes = True, self.world.processes_of(name)

    # Faults

    def kill(self, name: str, how: End | None = None) -> None:
        model = self.of(name)
        if model.processes:
            model.processes, model.died = set(), how or End(signal=9)
            model.serves, model.is_stopped = False, False

    def end(self, why: str = "killed by SIGKILL") -> None:
        if self.starts_at is None:
            self.ended = why
            for model in self.models.values():
                model.processes, model.serves = set(), False

    def end_processes(self, name: str, processes: frozenset[int] | None, *, is_death: bool) -> None:
        """End those of a model, or all; Triton may wait forever for one that was loading it."""
        model = self.of(name)
        ended = model.processes | model.loading if processes is None else processes
        is_load_ended = bool(model.loading & ended)
        model.processes, model.loading = model.processes - ended, model.loading - ended
        model.is_stopped = False
        if is_death:
            model.died = End(signal=9)
        if is_load_ended and self.world.reports_ends:
            model.loads_at, model.failure = None, "it did not respond for a second, or ended"

    def hear(self, heard: Heard, name: str = "", why: str = "no answer") -> None:
        loads = self.load_number(name) if name else -1
        self.heard.append(Canary(heard, name, why, loads))

    # Time

    def go_on(self, now: float) -> None:
        if self.starts_at is not None:
            if now >= self.starts_at:
                self._start()
            return
        if self.ended or self.is_stopped:
            return
        for name, model in self.models.items():
            if model.withdrawn_at is not None and now >= model.withdrawn_at:
                model.withdrawn_at = None
            if model.loads_at is not None and now >= model.loads_at and self.obeys:
                self._load(name, model)
            if model.drops_at is not None and now >= model.drops_at and self.obeys:
                model.drops_at, model.serves = None, False
                if not model.lingers:
                    model.processes = set()

    def _start(self) -> None:
        broken = {n: why for n in self.starting if (why := self.world.why_not(n))}
        left = [name for name in self.starting if name not in broken]
        self.starts_at, self.models, self.is_stopped, self.is_stuck = None, {}, False, False
        if self.starting and not left:
            self.ended = "exit code 1"
            self.start = StartPicture("no model loads", broken)
        elif self.world.deadly.intersection(self.starting):
            self.ended = "exit code 1"
            self.start = StartPicture("exit code 1")
        else:
            self.ended, self.start = "", StartPicture(failures=broken)
            self.has(*left)

    def _load(self, name: str, model: Model) -> None:
        model.loads_at, loaded, model.loading = None, model.loading, set()
        if name in self.world.deadly:
            self.end("exit code 1")
            return
        if why := self.world.why_not(name):
            model.failure = why
            return
        model.loads, model.all_loads = model.loads + 1, model.all_loads + 1
        model.serves, model.is_stopped = True, False
        model.processes = loaded or self.world.processes_of(name)

    def picture(self, now: float) -> TritonPicture:
        start, self.start = self.start, None
        if self.starts_at is not None:
            return TritonPicture(is_busy=True)
        heard, self.heard = tuple(self.heard), []
        checked = tuple(each for at, each in self.checked if at <= now)
        self.checked = [(at, each) for at, each in self.checked if at > now]
        has_read = tuple(each for at, each in self.has_read if at <= now)
        self.has_read = [(at, each) for at, each in self.has_read if at > now]
        models = {name: self._picture_of(name, now) for name in {*self.models, *self.world.offered}}
        return TritonPicture(
            models, self.ended, self.is_stopped, self.is_stuck, start=start, canaries=heard,
            checked=checked, has_read=has_read, resources="idle",
        )  # fmt: skip

    def _picture_of(self, name: str, now: float) -> ModelPicture:
        model = self.of(name)
        died, model.died = model.died, None
        hangs = bool(self.ended) or self.is_stopped
        return ModelPicture(
            has_folder=name not in self.world.removed,
            not_asked=self.world.not_asked if model.loads_at is None and not model.loads else "",
            load_number=self.load_number(name), is_loaded=model.loads > 0, failure=model.failure,
            is_loading=model.loads_at is not None,
            is_hopeless=model.failure.startswith("ImportError"),
            is_unhealthy="did not respond" in model.failure,
            processes=frozenset(model.processes | model.loading), died=died,
            is_stopped=model.is_stopped,
            seconds=model.seconds, answers=model.answers,
            takes_requests=None if hangs else model.serves, asked_at=now,
            is_being_withdrawn=model.withdrawn_at is not None,
            runs_in_triton=name in self.world.graphs,
        )  # fmt: skip


class World:
    """A `serve` of simulated Tritons; models that are named with parts are made of them."""

    def __init__(
        self,
        *names: str,
        replicas: int = 1,
        on_demand: OnDemand | None = None,
        loaded: Sequence[str] | None = None,
        **parts: tuple[str, ...],
    ) -> None:
        self.now = 1000.0
        self.parts = parts
        self.offered = [*names]
        self.broken: dict[str, str] = {}
        self.removed: set[str] = set()
        self.deadly: set[str] = set()
        """Models that end the Triton that loads them."""
        self.hanging: set[str] = set()
        """Models whose loads never end, but in a new Triton."""
        self.reports_ends = True
        """Whether Triton reports the end of a process that was loading a model."""
        self.graphs: set[str] = set()
        self.not_asked = ""
        self.check: Callable[[actions.CheckAnswer], Checked] | None = None
        """How a model answers when it is asked a known answer again."""
        self.reported: list[actions.ReportFault] = []
        self.reads_in = 5.0
        """The seconds in which a model reads its warm prompts."""
        self.unread: tuple[str, ...] = ()
        """Why models cannot."""
        self.sizes: dict[str, float] = {}
        self.lines: list[str] = []
        self.done: list[Action] = []
        self.outcomes: dict[Hold | Order, str] = {}
        self.desired = Desired()
        self._process = 0
        self.tritons = [Triton(self, number) for number in range(replicas)]
        memories = [TritonMemory(n, on_demand=on_demand is not None) for n in range(replicas)]
        up = names if loaded is None and on_demand is None else loaded or ()
        for triton, memory in zip(self.tritons, memories, strict=True):
            for name in up:
                for each in (*parts.get(name, ()), name):
                    triton.has(each)
                    memory.add(each, State.READY, self.now, parts.get(each, ()))
            for name in names:
                if name not in memory.models and on_demand is not None:
                    memory.add(name, State.UNLOADED, self.now)
        self.memory = Memory(memories)
        if on_demand is not None:
            self.memory.demand = Demand(names, on_demand, self.now)

    def processes_of(self, name: str) -> set[int]:
        self._process += 1
        return set() if name in self.graphs else {self._process}

    def why_not(self, name: str) -> str:
        broken = (self.broken.get(each) for each in (name, *self.parts.get(name, ())))
        return next(filter(None, broken), "")

    def picture(self) -> Picture:
        return Picture(
            self.now, tuple(triton.picture(self.now) for triton in self.tritons),
            parts={name: self.parts.get(name, ()) for name in self.offered},
            sizes={name: self.sizes.get(name, 1e6) for name in self.offered},
        )  # fmt: skip

    def step(self, seconds: float = TICK) -> list[Action]:
        """Let time go by, look, decide and act once."""
        self.now += seconds
        for triton in self.tritons:
            triton.go_on(self.now)
        actions_ = decide(self.desired, self.picture(), self.memory)
        for action in actions_:
            self._act(action)
        self.done += actions_
        return actions_

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step()

    def run_until(self, done: Callable[[], Any], seconds: float = 120.0) -> float:
        """Run until something is so, and return how long that took."""
        began = self.now
        while not done():
            assert self.now - began < seconds, self.lines
            self.step()
        return self.now - began

    # What is asked

    def order(self, do: Literal["load", "reload", "unload"], name: str) -> Order:
        future: Any = asyncio.Future(loop=_LOOP)
        order = Order(do, name, self.parts.get(name, ()), future)
        self.desired.orders.append(order)
        return order

    def outcome(self, asked: Hold | Order) -> str:
        """Run until an order or a hold is granted or refused; return the error."""
        self.run_until(lambda: asked in self.outcomes)
        return self.outcomes[asked]

    def hold(self, name: str, *, load: bool = True) -> Hold:
        hold = Hold(name, asyncio.Future(loop=_LOOP), load)
        self.desired.holds.append(hold)
        return hold

    def release(self, hold: Hold) -> None:
        self.desired.holds.remove(hold)

    def states(self, number: int = 0) -> dict[str, str]:
        models = self.memory.tritons[number].models
        return {name: model.state.value for name, model in models.items()}

    def serving(self, number: int = 0) -> set[str]:
        models = self.tritons[number].models
        # Triton calls a model ready whose process has crashed.
        return {
            name
            for name, model in models.items()
            if model.serves and (model.processes or name in self.graphs)
        }

    def dropped(self) -> list[str]:
        return [
            name for each in self.done if isinstance(each, actions.Drop) for name in each.models
        ]

    def killed(self) -> list[str]:
        return [each.model for each in self.done if isinstance(each, actions.Kill)]

    # Actions

    def _act(self, action: Action) -> None:
        match action:
            case actions.Tell(line):
                self.lines.append(line)
            case actions.Grant(hold):
                self.outcomes[hold] = ""
            case actions.Inform(hold, place, going):
                hold.place, hold.going = place, going
            case actions.Refuse(whom, error):
                self.outcomes[whom] = str(error)
                self._forget(whom)
            case actions.Fulfil(order):
                self.outcomes[order] = ""
                self._forget(order)
            case actions.StartFrontend():
                pass
            case _:
                self._act_on(action, self.tritons[action.triton])

    def _forget(self, whom: Hold | Order) -> None:
        if isinstance(whom, Order):
            self.desired.orders.remove(whom)

    def _act_on(self, action: Any, triton: Triton) -> None:
        match action:
            case actions.Start(models=names):
                triton.end("ended by its supervisor")
                triton.starting, triton.starts_at = names, self.now + STARTS_IN
                triton.started_with.append(names)
            case actions.Stop():
                triton.end("ended by its supervisor")
            case actions.Load(models=names):
                for name in names:
                    model = triton.of(name)
                    model.loads, model.failure, model.drops_at = 0, "", None
                    if not self.not_asked:
                        model.loads_at = (
                            float("inf") if name in self.hanging else self.now + LOADS_IN
                        )
                        model.loading = self.processes_of(name)
            case actions.Drop(models=names):
                for name in names:
                    triton.of(name).drops_at = self.now + DROPS_IN
                    triton.of(name).loads_at, triton.of(name).loading = None, set()
            case actions.Kill(model=name, processes=processes, is_death=is_death):
                triton.end_processes(name, processes, is_death=is_death)
            case actions.StopTrying(model=name):
                triton.of(name).withdrawn_at = self.now + 3.0
            case actions.CheckAnswer():
                assert self.check is not None
                found = self.check(action)
                triton.checked.append((self.now + found.took, found))
            case actions.ReadAhead(model=name):
                number, tokens = triton.load_number(name), 0 if self.unread else 1234
                read = HasRead(name, number, self.reads_in, tokens, self.unread)
                triton.has_read.append((self.now + self.reads_in, read))
            case actions.ReportFault():
                self.reported.append(action)


_LOOP = asyncio.new_event_loop()
