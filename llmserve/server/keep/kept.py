"""What is known of one Triton and of its models; the other modules here read and change it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmserve.contract.report import ModelReport, ReplicaReport, State
from llmserve.repository.repository import Repository
from llmserve.server.keep.states import Watch
from llmserve.server.run.ends import End
from llmserve.server.run.log import ServerLog
from llmserve.server.server import Server
from llmserve.server.settings import ServerSettings

CHECK_INTERVAL = 0.25
"""Seconds between two checks."""
GONE = 2.0
"""Seconds after which a missing folder is not one that a build is replacing."""


@dataclass
class KeptModel(Watch):
    """A model, with its count of loads at the last load request."""

    loads: int = 0
    served: bool = False
    """Whether this Triton has loaded it at least once."""
    died_at: float | None = None
    how: End = field(default_factory=End)
    """What ended its process."""
    raised_at: float | None = None
    """When it was seen that it cannot be loaded, while its process goes on."""
    cost_restart: bool = False
    """Whether Triton has to be restarted, or was, since it was loaded in vain."""
    parts: tuple[str, ...] = ()
    former: tuple[str, ...] = ()
    """Parts that an earlier build had, and that are loaded until a later one is."""
    gone_since: float | None = None
    """When its folder was first seen to be missing."""
    note: str = ""

    def check_folder(self, folder: Path, now: float) -> None:
        """Report a folder that was deleted or renamed; Triton itself does not notice."""
        if folder.is_dir():
            self.gone_since, self.note = None, ""
        elif self.gone_since is None:
            self.gone_since = now
        elif now - self.gone_since > GONE and not self.note:
            self.note = f"{folder} is gone: llmserve unload {self.name}, or build it again"
            self.notify(f"{self.name}: {self.note}")

    def report(self) -> ModelReport:
        return ModelReport(
            self.name, self.state, self.why, self.restarts, self.code, note=self.note
        )


@dataclass
class Kept:
    """A server that was started with ``settings``, and the states of it and of its models."""

    settings: ServerSettings
    server: Server
    notify: Callable[[str], None]
    stopping: bool = False
    emptied: bool = False
    """Whether a user has unloaded the last model that could answer: that is no failure."""
    models: dict[str, KeptModel] = field(default_factory=dict)
    restart_wanted: tuple[float, str] | None = None
    """Since when, and why, Triton is to be restarted once its models have nothing to do."""

    def __post_init__(self) -> None:
        self.take_over(self.server)
        self.triton = Watch("triton", self.notify, State.READY, since=time.monotonic())
        for name, state in self.server.models().items():
            if state == "READY":
                self.models[name] = self.watched(name, State.READY)
        for name, why in self.server.failures.items():
            self.models[name] = replace(self.watched(name, State.FAILED), why=why)

    def take_over(self, server: Server) -> None:
        self.server = server
        self.log = ServerLog(server.log_file)
        self.stubs = server.stubs

    def watched(self, name: str, state: State) -> KeptModel:
        return KeptModel(
            name,
            self.notify,
            state,
            since=time.monotonic(),
            loads=self.log.loads[name],
            served=state is State.READY,
            parts=Repository.open(self.settings.repository).parts_of(name),
        )

    def folder(self, name: str) -> Path:
        return self.settings.repository / name

    def own_parts(self, name: str) -> list[str]:
        """Return the parts of a model that no other one that is loaded has."""
        others = [m for m in self.models.values() if m.name != name and not m.state.is_down]
        needed = {part for other in others for part in (*other.parts, *other.former)}
        model = self.models.get(name)
        own = (*model.parts, *model.former) if model else ()
        return [part for part in own if part not in needed]

    def want_restart(self, now: float, why: str) -> None:
        """Have Triton restarted once its models, which still answer, have nothing to do."""
        if self.restart_wanted is None:
            self.restart_wanted = now, why
            self.notify(f"triton: is restarted once nobody uses it ({why})")

    def lost(self, now: float, why: str, *, fault: bool = True) -> None:
        """Have Triton restarted with all models that have not failed."""
        self.restart_wanted = None
        if fault:
            self.triton.died(now, why)
        else:
            self.triton.interrupted(now, why)
        for model in self.models.values():
            model.interrupted(now, why)

    @property
    def given_up(self) -> bool:
        """Whether its Triton is no longer restarted."""
        return self.triton.state is State.FAILED

    @property
    def failed(self) -> bool:
        """Whether nothing that could answer is left here."""
        models = [model.state is State.FAILED for model in self.models.values()]
        return self.given_up or (bool(models) and all(models) and not self.may_be_empty)

    @property
    def may_be_empty(self) -> bool:
        """Whether a Triton without models is no failure."""
        return self.emptied or self.settings.on_demand

    def why_it_failed(self) -> set[str]:
        """Return what has died too often, and why."""
        watches = [self.triton, *self.models.values()]
        return {f"{w.name}: {w.why}" for w in watches if w.state is State.FAILED and w.why}

    def report(self) -> ReplicaReport:
        models = (
            replace(model.report(), loads=self.log.loads[model.name])
            for model in self.models.values()
        )
        return ReplicaReport(
            self.triton.state, self.server.grpc_url, self.server.http_url, self.server.runtime,
            str(self.server.log_file), self.triton.restarts, self.triton.why, tuple(models),
        )  # fmt: skip
