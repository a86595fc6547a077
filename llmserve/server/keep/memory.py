"""What is remembered between two pictures. Only :mod:`llmserve.server.keep.decide` changes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from llmserve.contract.report import ModelReport, State
from llmserve.server.keep.actions import Action, Tell
from llmserve.server.keep.certificate import Certificate
from llmserve.server.keep.demand import Demand
from llmserve.server.keep.desired import Order
from llmserve.server.keep.states import DIED, Watch
from llmserve.server.run.ends import End


@dataclass
class ModelMemory(Watch):
    """A model in one Triton, or a part of one."""

    served: bool = False
    """Whether this Triton has loaded it at least once."""
    died_at: float | None = None
    how: End = field(default_factory=End)
    """What ended its process."""
    raised_at: float | None = None
    """When it was seen that it cannot be loaded, while its process goes on."""
    loading_since: float | None = None
    """When Triton was first seen to load it, if it does."""
    ended_late: float | None = None
    """When its load was ended, which took too long."""
    cost_restart: bool = False
    """Whether Triton has to be restarted, or was, since it was loaded in vain."""
    parts: tuple[str, ...] = ()
    former: tuple[str, ...] = ()
    """Parts that an earlier build had, and that are loaded until a later one is."""
    gone_since: float | None = None
    """When its folder was first seen to be missing."""
    note: str = ""
    refused: str = ""
    """Why it was not loaded when that was last asked for."""
    certificate: Certificate = field(default_factory=Certificate)
    """What is remembered of its answers, if they are checked."""
    to_read: int | None = None
    """Which of its loads was asked to read its warm prompts, if it has any."""
    has_read: int | None = None
    """Which of its loads has read them, or cannot."""

    def forget_load(self) -> None:
        """Forget what was seen of an earlier load."""
        self.died_at = self.raised_at = self.loading_since = self.ended_late = None

    def report(self) -> ModelReport:
        return ModelReport(
            self.name, self.state, self.why, self.restarts, self.code, note=self.note
        )


@dataclass
class LoadUnderWay:
    """A load that is under way, of a model and of what it is made of."""

    names: tuple[str, ...]
    """The parts, then the model."""
    since: float
    start: int
    """Which start of Triton it was asked of."""
    is_asked: bool = True
    """Whether Triton was asked; one that is being restarted is asked later, if need be."""
    former: tuple[str, ...] = ()
    """What an earlier build of it was made of, which goes afterwards."""
    former_processes: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The processes of each of its names when it was asked for."""
    loaded_at: float | None = None
    tries: int = 1
    was_served: bool = False
    """Whether an earlier build answers meanwhile."""

    @property
    def model(self) -> str:
        return self.names[-1]


class Stage(Enum):
    """What a model that is unloaded waits for."""

    IDLE = "that it has nothing to compute (UNLOADED_AT_WORK)"
    SETTLED = "that nothing of it is being loaded (FILES_GONE)"
    GONE = "that Triton sends nothing to it any more"
    ENDED = "that its processes have ended (NEVER_ENDED)"


@dataclass
class UnloadUnderWay:
    """A model that is being unloaded, with the parts that no other one has."""

    names: tuple[str, ...]
    """The model before its parts."""
    since: float
    start: int
    stage: Stage = Stage.SETTLED
    dropped: tuple[str, ...] = ()
    """What Triton was asked to unload, so far."""
    dropped_at: float = 0.0
    measured_at: float = 0.0
    seconds: float = 0.0
    answers: tuple[int, ...] = ()
    """What they had computed and answered then."""
    again: tuple[str, ...] | None = None
    """What is loaded again afterwards, since it failed by chance."""
    tries: int = 1
    quiet: bool = False
    """Whether it is not told, since it was never loaded."""

    @property
    def model(self) -> str:
        return self.names[0]

    @property
    def left(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.dropped)


@dataclass
class TritonMemory:
    """One Triton, and the models that it has or is to have."""

    number: int
    repository: Path = Path()
    is_renewable: bool = True
    """Whether it can load and unload models while it runs."""
    on_demand: bool = False
    ready_timeout: float = 900.0
    """Seconds for the load of a model, and for one that an unload has to wait for."""
    certifies: bool = False
    """Whether the answers of its models are checked."""
    warm: frozenset[str] = frozenset()
    """The models that read warm prompts once they are loaded."""
    is_said: bool = False
    """Whether its number is said, since there are several."""
    lines: list[str] = field(default_factory=list)
    """What is to be told."""
    models: dict[str, ModelMemory] = field(default_factory=dict)
    loading: dict[str, LoadUnderWay] = field(default_factory=dict)
    unloading: dict[str, UnloadUnderWay] = field(default_factory=dict)
    starts: int = 0
    emptied: bool = False
    """Whether a user has unloaded the last model that could answer: that is no failure."""
    restart_wanted: tuple[float, str] | None = None
    """Since when, and why, it is to be restarted once its models have nothing to do."""
    loading_at: float = 0.0
    """When a model was last being loaded; others begin after it."""
    starting: tuple[str, ...] = ()
    """The models with which it is being started."""
    has_stopped: bool = False
    """Whether it was ended after it was given up."""

    def __post_init__(self) -> None:
        self.triton = Watch("triton", self.lines.append, State.READY)

    def add(self, name: str, state: State, now: float, parts: Iterable[str] = ()) -> ModelMemory:
        """Remember a model that is in this state."""
        model = self.models[name] = ModelMemory(
            name, self.lines.append, state, since=now, served=state is State.READY,
            parts=tuple(parts),
        )  # fmt: skip
        return model

    def own_parts(self, name: str) -> list[str]:
        """Return the parts of a model that no other one that is loaded has."""
        others = [m for m in self.models.values() if m.name != name and not m.state.is_down]
        needed = {part for other in others for part in (*other.parts, *other.former)}
        # One that has failed is still followed, with its parts, until that is noticed.
        needed |= {
            part for load in self.loading.values() if load.model != name for part in load.names
        }
        model = self.models.get(name)
        own = (*model.parts, *model.former) if model else ()
        return [part for part in own if part not in needed]

    def with_parts(self, name: str) -> tuple[str, ...]:
        model = self.models.get(name)
        return (*(model.parts if model else ()), name)

    def want_restart(self, now: float, why: str) -> None:
        """Have it restarted once its models, which still answer, have nothing to do."""
        if self.restart_wanted is None:
            self.restart_wanted = now, why
            self.lines.append(f"triton: is restarted once nobody uses it ({why})")

    def lost(self, now: float, why: str, *, fault: bool = True) -> None:
        """Have it restarted with all models that have not failed."""
        self.restart_wanted = None
        if fault:
            self.triton.died(now, why)
        else:
            self.triton.interrupted(now, why)
        for model in self.models.values():
            if not self.stays_down:
                model.interrupted(now, why)
            elif not model.state.is_down:
                model.failed(now, why, DIED)

    @property
    def stays_down(self) -> bool:
        """Whether it is no longer restarted."""
        return self.triton.state is State.FAILED

    @property
    def may_be_empty(self) -> bool:
        """Whether it is no failure if it has no models."""
        return self.emptied or self.on_demand

    @property
    def has_failed(self) -> bool:
        """Whether nothing that could answer is left here."""
        models = [model.state is State.FAILED for model in self.models.values()]
        return self.stays_down or (bool(models) and all(models) and not self.may_be_empty)

    def why_it_failed(self) -> set[str]:
        """Return what has died too often, or cannot be loaded, and why."""
        watches = [self.triton, *(m for m in self.models.values() if m.why != self.triton.why)]
        return {f"{w.name}: {w.why}" for w in watches if w.state is State.FAILED and w.why}

    def is_changing(self, name: str) -> bool:
        """Return whether a model is being loaded or unloaded."""
        return name in self.loading or name in self.unloading

    def takes_memory(self, name: str) -> bool:
        """Return whether a model, or a part that it alone has, takes memory, at work or not."""
        if name in self.unloading or (model := self.models.get(name)) is None:
            return name in self.unloading
        if model.state is State.FAILED:
            parts = (self.models.get(part) for part in self.own_parts(name))
            return any(part and not part.state.is_down for part in parts)
        return not model.state.is_down

    @property
    def of_interest(self) -> frozenset[str]:
        """The models that are loaded or unloaded, of which more has to be seen."""
        return frozenset(
            name
            for changes in (self.loading, self.unloading)
            for change in changes.values()
            for name in change.names
        )

    @property
    def to_be_asked(self) -> frozenset[str]:
        """The models of which Triton is asked whether it takes requests for them."""
        loaded = {load.model for load in self.loading.values() if load.loaded_at is not None}
        dropped = (u.dropped for u in self.unloading.values() if u.stage is Stage.GONE)
        return frozenset(loaded.union(*dropped))

    def take_lines(self) -> list[Action]:
        """Return what there is to tell since the last time."""
        number = self.number if self.is_said else None
        actions: list[Action] = [Tell(line, number) for line in self.lines]
        self.lines.clear()
        return actions


@dataclass
class FrontendMemory(Watch):
    """A frontend; it is started again as often as it ends, if need be once a minute.

    Without it, a ``serve`` that runs would serve nobody.
    """

    number: int = 0
    is_starting: bool = False
    deaths: float = math.inf
    deaths_window: float = 900.0
    max_wait: float = 60.0


@dataclass
class OrderMemory:
    """A user's order that is carried out: by one replica after another."""

    order: Order
    left: list[int]
    """The Tritons that are still to do it."""
    has_begun: bool = False


@dataclass
class Memory:
    """All that is remembered."""

    tritons: list[TritonMemory]
    frontends: list[FrontendMemory] = field(default_factory=list)
    demand: Demand | None = None
    """If models are loaded on demand."""
    order: OrderMemory | None = None
    gone_since: dict[str, float] = field(default_factory=dict)
    """When the folder of a model on offer was first seen to be missing."""
    lines: list[str] = field(default_factory=list)

    @property
    def changes(self) -> set[tuple[int, str]]:
        """What is loaded and unloaded at the moment, and in which Triton."""
        return {(t.number, name) for t in self.tritons for name in (*t.loading, *t.unloading)}

    @property
    def is_about_to_end(self) -> bool:
        """Whether something is waited for that takes a moment, and not as long as a load."""
        return any(triton.unloading or triton.to_be_asked for triton in self.tritons)
