"""What is done about a picture. There is no clock here, no file and nothing to wait for.

:func:`decide` changes the memory, and nothing else; what it returns is carried out by
:mod:`llmserve.server.keep.act`, and what comes of that is in a later picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmserve.contract.report import State
from llmserve.server.keep import deaths, load_and_unload, orders
from llmserve.server.keep.actions import Action, StartFrontend, Tell
from llmserve.server.keep.answer_checks import check_answers
from llmserve.server.keep.demand import Demand, LoadEverywhere, UnloadEverywhere
from llmserve.server.keep.desired import Desired
from llmserve.server.keep.memory import FrontendMemory, Memory, TritonMemory
from llmserve.server.keep.picture import FrontendPicture, Picture
from llmserve.server.keep.reading_ahead import read_ahead

_PATIENCE = 60.0
"""Seconds that requests have to end before a Triton that loads nothing any more is restarted."""


def decide(desired: Desired, picture: Picture, memory: Memory) -> list[Action]:
    """Return what is to be done, so that what is seen becomes what is desired."""
    actions: list[Action] = []
    for frontend, front_seen in zip(memory.frontends, picture.frontends, strict=True):
        actions += _keep_frontend(frontend, front_seen, picture.now)
    for triton, seen in zip(memory.tritons, picture.tritons, strict=True):
        actions += deaths.notice(triton, seen, picture.now)
    for triton, seen in zip(memory.tritons, picture.tritons, strict=True):
        actions += load_and_unload.follow(triton, seen, picture.now)
    actions += decide_wishes(desired, picture, memory)
    for triton, seen in zip(memory.tritons, picture.tritons, strict=True):
        actions += deaths.revive(triton, seen, picture.now)
    for triton, seen in zip(memory.tritons, picture.tritons, strict=True):
        actions += read_ahead(triton, seen)
        actions += check_answers(triton, seen, picture.now)
    return [*actions, *_lines(memory)]


def decide_wishes(desired: Desired, picture: Picture, memory: Memory) -> list[Action]:
    """Return what is to be done for who holds models, waits for them or gives orders.

    This may be asked again about the same picture, when somebody comes or goes.
    """
    if memory.demand is None:
        return orders.carry_out(desired, picture, memory)
    models, now = AllReplicas(memory.tritons, picture.sizes), picture.now
    for triton in memory.tritons:
        _restart_if_wanted(triton, now, in_use=memory.demand.is_in_use)
    _remove_gone(memory, memory.demand, models, picture)
    actions: list[Action] = []
    for step in memory.demand.decide(desired, models, now):
        if isinstance(step, LoadEverywhere):
            parts = picture.parts.get(step.model, ())
            for triton in models.serving:
                seen = picture.tritons[triton.number]
                actions += load_and_unload.begin_load(triton, seen, step.model, parts, now)
        elif isinstance(step, UnloadEverywhere):
            for triton in models.serving:
                if triton.takes_memory(step.model) and step.model not in triton.unloading:
                    load_and_unload.begin_unload(triton, step.model, now)
        else:
            actions.append(step)
    return actions


@dataclass(frozen=True)
class AllReplicas:
    """The models of all replicas, which are the same."""

    tritons: list[TritonMemory]
    sizes: Mapping[str, float]

    @property
    def serving(self) -> list[TritonMemory]:
        return [triton for triton in self.tritons if not triton.stays_down]

    @property
    def has_ended(self) -> bool:
        return not self.serving

    @property
    def is_paused(self) -> bool:
        """Whether a Triton is about to be restarted, or all are at the moment."""
        serving = self.serving
        is_wanted = any(triton.restart_wanted for triton in serving)
        return is_wanted or not any(triton.triton.alive for triton in serving)

    def takes_memory(self, name: str) -> bool:
        return any(triton.takes_memory(name) for triton in self.serving)

    def is_changing(self, name: str) -> bool:
        return any(triton.is_changing(name) for triton in self.serving)

    def refused(self, name: str) -> str:
        if not self.serving:
            return "Triton has ended"
        models = [triton.models.get(name) for triton in self.serving]
        return next((model.refused for model in models if model and model.refused), "")

    def why_it_failed(self, name: str) -> str:
        models = [t.models[name] for t in self.serving if name in t.models]
        failed = [model for model in models if model.state is State.FAILED]
        return failed[0].why if failed and len(failed) == len(models) else ""

    def size(self, name: str) -> float:
        return self.sizes.get(name, 0.0)

    def cost_restart(self, name: str) -> bool:
        return any(t.models[name].cost_restart for t in self.serving if name in t.models)


def _restart_if_wanted(triton: TritonMemory, now: float, *, in_use: bool) -> None:
    """Restart what is to be restarted, if its models have nothing to do, or for too long."""
    if triton.restart_wanted is not None and not triton.stays_down:
        since, why = triton.restart_wanted
        if not in_use or now - since > _PATIENCE:
            triton.lost(now, why, fault=False)


def _remove_gone(memory: Memory, demand: Demand, models: AllReplicas, picture: Picture) -> None:
    """Offer no more what is not loaded and has no folder, as after `llmserve remove`."""
    before = memory.gone_since
    gone = [name for name in demand.offered if not picture.tritons[0].of(name).has_folder]
    memory.gone_since = {name: before.get(name, picture.now) for name in gone}
    for name, since in memory.gone_since.items():
        if picture.now - since > deaths.GONE and demand.offer_no_more(name, models):
            for triton in memory.tritons:
                triton.models.pop(name, None)


def _keep_frontend(frontend: FrontendMemory, seen: FrontendPicture, now: float) -> list[Action]:
    """Notice that a frontend has ended, or hangs, and start it again when its wait is over."""
    if seen.start is not None:
        frontend.is_starting = False
        if seen.start.problem:
            frontend.died(now, seen.start.problem)
        else:
            frontend.loaded(now)
    if frontend.is_starting:
        return []
    if frontend.alive and seen.ended:
        frontend.died(now, seen.ended)
    elif frontend.alive and seen.is_stopped:
        frontend.died(now, "it is stopped, by a signal")
    for canary in seen.canaries:
        deaths.hear(frontend, canary, now)
    if frontend.state is State.RESTARTING and now >= frontend.restart_at:
        frontend.loading(now)
        frontend.is_starting = True
        return [StartFrontend(frontend.number)]
    return []


def _lines(memory: Memory) -> list[Action]:
    actions: list[Action] = [Tell(line) for line in memory.lines]
    memory.lines.clear()
    for triton in memory.tritons:
        actions += triton.take_lines()
    return actions
