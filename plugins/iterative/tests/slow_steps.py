"""A generator that somebody else wrote: it repeats the prompt, and every step takes its time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmserve import hookimpl
from llmserve.roles import Generator, Recipe
from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Tokenizer

STEP = 0.6


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    """Register it for the batching ``iterative``."""
    return [
        Generator(
            name="slow",
            summary="Repeats the prompt, slowly",
            runtime=f"{__name__}:SlowSteps",
            modes=frozenset({"step"}),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    """Register what ``build`` selects."""
    return [
        Recipe(
            name="slow",
            summary="Repeats the prompt, slowly",
            tokenizer="transformers",
            generator="slow",
            batching="iterative",
            formatter="text",
        )
    ]


@dataclass
class Progress:
    """Nothing fails here."""

    failed: list[tuple[Generation, Exception]] = field(default_factory=list)


class SlowSteps:
    """Generator and stepper in one."""

    context_length: int | None = 512
    eos_ids: frozenset[int] = frozenset()
    cache_tokens = cache_used = waiting = 0

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._live: list[Generation] = []

    def stepper(self, tokenizer: Tokenizer) -> SlowSteps:
        return self

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def busy(self) -> bool:
        return bool(self._live)

    def admit(self, generation: Generation) -> None:
        self._live.append(generation)

    def drop(self, generation: Generation) -> None:
        self._live = [one for one in self._live if one is not generation]

    def step(self) -> Progress:
        time.sleep(STEP)
        for one in list(self._live):
            one.push(one.prompt_ids[len(one.token_ids) % len(one.prompt_ids)])
            if one.done:
                self.drop(one)
        return Progress()
