"""What the models on demand are made of, what they are for, and how much memory they take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmserve.contract.report import State
from llmserve.contract.tasks import GENERATE, PARAMETER
from llmserve.contract.tensors import TEXT_INPUT, TEXT_OUTPUT
from llmserve.repository.repository import Repository
from llmserve.server.keep.memory import ModelMemory, TritonMemory
from llmserve.server.keep.observe import RunningTriton
from llmserve.server.run.machine import expected_memory, first_memory

_MEASURED_EVERY = 1.0
"""Seconds between two measurements."""
_Build = tuple[str, int, int]
"""A model, and what tells its folder from that of another build."""


@dataclass(frozen=True)
class _Loaded:
    """What was loaded, whose folders may have been replaced since."""

    build: _Build
    in_triton: Mapping[str, int]
    """The model and its parts that have no process to measure, and the memory expected of each."""


class Sizes:
    """Looks at the files and the processes of models, in all replicas together."""

    def __init__(self, running: Sequence[RunningTriton], memory: Sequence[TritonMemory]) -> None:
        self._running = running
        self._memory = memory
        self._repository = Repository.open(running[0].settings.repository)
        self._texts = running[0].settings.texts
        self._names: tuple[str, ...] = ()
        self._alive: list[set[str]] = []
        self._builds: dict[str, _Build] = {}
        self._expected: dict[_Build, float] = {}
        self._most: defaultdict[_Build, float] = defaultdict(float)
        """The most memory that each build was ever seen to take, with all replicas."""
        self._now: dict[str, float] = {}
        self._loaded: dict[str, _Loaded] = {}
        self._measured_at = 0.0

    def look(self, names: Sequence[str], now: float) -> None:
        """Notice new builds at once, and measure what is loaded from time to time."""
        parts = {part for name in names for part in self._repository.parts_of(name)}
        builds = {name: self._build(name) for name in {*names, *parts}}
        if builds != self._builds:
            # A model, or what it is made of, is new or was built anew.
            self._builds, self._repository = builds, Repository.open(self._repository.path)
            self._expected.clear()
        self._names = tuple(names)
        alive = [{m.name for m in memory.models.values() if m.alive} for memory in self._memory]
        if alive != self._alive or now - self._measured_at >= _MEASURED_EVERY:
            self._alive, self._measured_at = alive, now
            self._measure()

    def parts(self) -> dict[str, tuple[str, ...]]:
        return {name: self._repository.parts_of(name) for name in self._names}

    def sizes(self) -> dict[str, float]:
        return {name: self.size(name) for name in self._names}

    def size(self, name: str) -> float:
        """Return what a model takes by the last measurement, or took, or is expected to take.

        Before it was ever loaded, that is the size of its weights, and a little for each process.
        """
        if now := self._now.get(name, 0.0):
            return now
        build = self._builds.get(name) or self._build(name)
        if build not in self._expected:
            names = self._repository.with_parts([name])
            each = (first_memory(self._repository.model(part)) for part in names)
            self._expected[build] = float(sum(each) * len(self._memory))
        return max(self._expected[build], self._most[build])

    def task(self, name: str) -> str:
        """Return what a model is for, "" if it takes no text, or returns none."""
        if (config := self._repository.model(name).config) is None:
            # Nothing is known of one that cannot be read.
            return GENERATE
        inputs, outputs = ({each.name for each in side} for side in (config.input, config.output))
        # What llmserve.toml says of one that others wrote is not in its own configuration.
        text_input, text_output = self._texts.get(name, (TEXT_INPUT.name, TEXT_OUTPUT.name))
        if text_input not in inputs:
            return ""
        declared = (
            config.parameters[PARAMETER].string_value if PARAMETER in config.parameters else ""
        )
        return declared or (GENERATE if text_output in outputs else "")

    def adapters(self, name: str) -> tuple[str, ...]:
        """Return the names of the adapters that a model has in its folder."""
        return self._repository.model(name).adapters

    def _build(self, name: str) -> _Build:
        return name, *self._repository.model(name).state

    def _measure(self) -> None:
        self._now, before, self._loaded = {}, self._loaded, {}
        for running, memory in zip(self._running, self._memory, strict=True):
            for name, model in memory.models.items():
                if model.alive or model.state is State.LOADING:
                    self._loaded[name] = before.get(name) or self._first_seen(model)
                    self._measure_model(running, model)

    def _first_seen(self, model: ModelMemory) -> _Loaded:
        parts = [self._repository.model(name) for name in (model.name, *model.parts)]
        in_triton = {part.name: expected_memory(part) for part in parts if part.runs_in_triton}
        return _Loaded(self._build(model.name), in_triton)

    def _measure_model(self, running: RunningTriton, model: ModelMemory) -> None:
        stubs, loaded = running.server.stubs, self._loaded[model.name]
        sizes = [stubs.memory(part) for part in (model.name, *model.parts)]
        # A stand-in's process is measured like others.
        sizes += [(size,) * 2 for part, size in loaded.in_triton.items() if not stubs.of(part)]
        most = sum(most for _, most in sizes) * len(self._memory)
        self._most[loaded.build] = max(self._most[loaded.build], most)
        if model.alive:
            now = self._now.get(model.name, 0.0) + sum(now for now, _ in sizes)
            self._now[model.name] = now
