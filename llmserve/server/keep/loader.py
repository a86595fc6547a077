"""Loads models in all replicas of a ``serve``, which are the same, and knows how large they are."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmserve.contract.report import State
from llmserve.contract.tasks import GENERATE, PARAMETER
from llmserve.contract.tensors import TEXT_INPUT, TEXT_OUTPUT
from llmserve.repository.repository import Repository
from llmserve.server.keep.keeper import Keeper
from llmserve.server.keep.kept import KeptModel
from llmserve.server.run.machine import expected_memory

_Build = tuple[str, int, int]
"""A model, and what tells its folder from that of another build."""
_PATIENCE = 60.0
"""Seconds that requests have to end before a Triton that loads nothing any more is restarted."""


@dataclass(frozen=True)
class _Loaded:
    """What was loaded, whose folders may have been replaced since."""

    build: _Build
    in_triton: Mapping[str, int]
    """The model and its parts that have no process to measure, and the memory expected of each."""


class ReplicaLoader:
    """Loads and unloads the models of these keepers, for :class:`Demand`."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self._keepers = keepers
        self._repository = Repository.open(keepers[0].kept.settings.repository)
        self._expected: dict[_Build, float] = {}
        self._most: defaultdict[_Build, float] = defaultdict(float)
        """The most memory that each build was ever seen to take, with all replicas."""
        self._now: dict[str, float] = {}
        self._loaded: dict[str, _Loaded] = {}

    def is_loaded(self, name: str) -> bool:
        return any(not model.state.is_down for model in self._of(name))

    def why_it_failed(self, name: str) -> str:
        states = self._of(name)
        failed = [model for model in states if model.state is State.FAILED]
        return failed[0].why if failed and len(failed) == len(states) else ""

    def cost_restart(self, name: str) -> bool:
        return any(model.cost_restart for model in self._of(name))

    def size(self, name: str) -> float:
        """Return what a model takes by the last measurement, or took, or is expected to take.

        Before it was ever loaded, that is the size of its weights, and a little for each process.
        """
        if now := self._now.get(name, 0.0):
            return now
        build = self._build(name)
        if build not in self._expected:
            # Read again: it is new, or was built anew.
            self._repository = Repository.open(self._repository.path)
            names = self._repository.with_parts([name])
            each = (expected_memory(self._repository.model(part)) for part in names)
            self._expected[build] = float(sum(each) * len(self._keepers))
        return max(self._expected[build], self._most[build])

    def _build(self, name: str) -> _Build:
        try:
            stat = (self._repository.path / name).stat()
        except OSError:
            return name, 0, 0
        return name, stat.st_ino, stat.st_mtime_ns

    def is_paused(self) -> bool:
        """Return whether a Triton is about to be restarted, or all are at the moment."""
        kept = [keeper.kept for keeper in self._serving()]
        return any(k.restart_wanted for k in kept) or not any(k.triton.alive for k in kept)

    def restart(self, now: float, *, in_use: bool) -> None:
        """Restart what is to be restarted, if its models have nothing to do, or for too long."""
        for keeper in self._serving():
            if (wanted := keeper.kept.restart_wanted) is not None:
                since, why = wanted
                if not in_use or now - since > _PATIENCE:
                    keeper.kept.lost(now, why, fault=False)

    def task(self, name: str) -> str:
        """Return what a model is for, "" if it takes no text, or returns none."""
        if (config := self._repository.model(name).config) is None:
            # Nothing is known of one that cannot be read.
            return GENERATE
        inputs, outputs = ({each.name for each in side} for side in (config.input, config.output))
        if TEXT_INPUT.name not in inputs:
            return ""
        declared = (
            config.parameters[PARAMETER].string_value if PARAMETER in config.parameters else ""
        )
        return declared or (GENERATE if TEXT_OUTPUT.name in outputs else "")

    def measure(self) -> None:
        """Measure the memory of the models that are loaded."""
        self._now, before, self._loaded = {}, self._loaded, {}
        for keeper in self._keepers:
            for name, model in keeper.kept.models.items():
                if model.alive or model.state is State.LOADING:
                    self._loaded[name] = before.get(name) or self._first_seen(model)
                    self._measure(keeper, model)

    def _first_seen(self, model: KeptModel) -> _Loaded:
        parts = [self._repository.model(name) for name in (model.name, *model.parts)]
        in_triton = {part.name: expected_memory(part) for part in parts if part.runs_in_triton}
        return _Loaded(self._build(model.name), in_triton)

    def _measure(self, keeper: Keeper, model: KeptModel) -> None:
        stubs, loaded = keeper.kept.stubs, self._loaded[model.name]
        sizes = [stubs.memory(part) for part in (model.name, *model.parts)]
        # A stand-in's process is measured like others.
        sizes += [(size,) * 2 for part, size in loaded.in_triton.items() if not stubs.of(part)]
        most = sum(most for _, most in sizes) * len(self._keepers)
        self._most[loaded.build] = max(self._most[loaded.build], most)
        if model.alive:
            now = self._now.get(model.name, 0.0) + sum(now for now, _ in sizes)
            self._now[model.name] = now

    async def check(self, name: str) -> None:
        """Raise if a model's files say that it could not be loaded."""
        await self._keepers[0].check_model(name)

    async def load(self, name: str) -> None:
        """Load a model everywhere, or nowhere."""
        # Read again: it may have been built anew.
        self._repository = Repository.open(self._repository.path)
        self._expected.pop(self._build(name), None)
        keepers = self._serving()
        for keeper in keepers:
            keeper.offer(name)
        done = await asyncio.gather(*(k.load(name) for k in keepers), return_exceptions=True)
        errors = [error for error in done if isinstance(error, BaseException)]
        if errors:
            loaded = [k for k, error in zip(keepers, done, strict=True) if error is None]
            await asyncio.gather(*(keeper.put_away(name) for keeper in loaded))
            raise errors[0]
        self.measure()

    async def unload(self, name: str) -> None:
        keepers = [k for k in self._serving() if not k.kept.models[name].state.is_down]
        await asyncio.gather(*(keeper.put_away(name) for keeper in keepers))
        self._now.pop(name, None)
        self._loaded.pop(name, None)

    def _serving(self) -> list[Keeper]:
        return [keeper for keeper in self._keepers if not keeper.kept.given_up]

    def _of(self, name: str) -> list[KeptModel]:
        keepers = self._serving()
        return [k.kept.models[name] for k in keepers if name in k.kept.models]
