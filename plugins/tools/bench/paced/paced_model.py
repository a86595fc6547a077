"""A plugin whose model computes nothing: each step takes 10 ms, and every sequence gets a token."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.plugin import Generator, Recipe, hookimpl
from llmserve.runtime import Generation, Progress, Tokenizer

STEP = 0.010
"""Seconds, from the beginning of a step to that of the next, whatever else is done meanwhile."""


class Paced:
    """A generator and its stepper: it repeats the prompt."""

    context_length = None
    eos_ids: frozenset[int] = frozenset()
    waiting = cache_used = cache_tokens = 0

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del settings, folder
        self._running: dict[int, Generation] = {}
        self._due = 0.0

    def stepper(self, tokenizer: Tokenizer) -> Paced:
        del tokenizer
        return self

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def live(self) -> int:
        return len(self._running)

    def admit(self, generation: Generation) -> None:
        self._running[id(generation)] = generation

    def drop(self, generation: Generation) -> None:
        self._running.pop(id(generation), None)

    def step(self) -> Progress:
        now = time.monotonic()
        # As a GPU does: what Python does beside it is not added to the step.
        self._due = max(self._due, now - STEP) + STEP
        time.sleep(max(0.0, self._due - now))
        for generation in list(self._running.values()):
            at = len(generation.token_ids)
            generation.push(generation.prompt_ids[at % len(generation.prompt_ids)])
            if generation.done:
                self.drop(generation)
        return Progress()


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    return [
        Generator(
            name="paced",
            summary="Steps of 10 ms without a model",
            runtime="paced_model:Paced",
            modes=frozenset({"step"}),
            source=None,
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(name="paced", summary="Steps of 10 ms", generator="paced", batching="continuous")
    ]
