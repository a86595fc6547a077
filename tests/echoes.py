"""An engine without a model, for tests of the drivers that step engines."""

from __future__ import annotations

import time
from threading import Event

from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Progress, Tokenizer


class Panic(BaseException):
    """Like pyo3's PanicException, which does not derive from Exception."""


class EchoEngine:
    """Repeats prompts forever, one byte per step, while ``may_step`` is set.

    ``?`` is refused, ``!`` fails at its third token, ``#`` fails the step for every request and
    ``~`` makes the step panic.
    """

    eos_ids: frozenset[int] = frozenset()
    waiting = 0

    def __init__(self, context_length: int | None = None, pause: float = 0.0) -> None:
        self.context_length = context_length
        self.cache_tokens = context_length or 1_000_000_000
        self.pause = pause
        self.running: list[Generation] = []
        self.batch_sizes: list[int] = []
        self.may_step = Event()
        self.may_step.set()

    def stepper(self, tokenizer: Tokenizer) -> EchoEngine:
        return self

    @property
    def busy(self) -> bool:
        return bool(self.running)

    @property
    def live(self) -> int:
        return len(self.running)

    @property
    def cache_used(self) -> int:
        return sum(len(g.prompt_ids) + len(g.token_ids) for g in self.running)

    def admit(self, generation: Generation) -> None:
        if ord("?") in generation.prompt_ids:
            raise RequestError("no questions")
        self.running.append(generation)

    def drop(self, generation: Generation) -> None:
        self.running = [other for other in self.running if other is not generation]

    def step(self) -> Progress:
        assert self.may_step.wait(10)
        time.sleep(self.pause)
        self.batch_sizes.append(len(self.running))
        progress = Progress()
        for generation in list(self.running):
            position = len(generation.token_ids)
            if ord("#") in generation.prompt_ids:
                raise MemoryError("no memory left")
            if ord("~") in generation.prompt_ids:
                raise Panic("index out of bounds")
            if ord("!") in generation.prompt_ids and position == 2:
                progress.failed.append((generation, ValueError("cannot go on")))
                self.drop(generation)
                continue
            generation.push(generation.prompt_ids[position % len(generation.prompt_ids)])
            if generation.done:
                self.drop(generation)
        return progress
