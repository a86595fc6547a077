"""An engine without a model, for tests of the drivers that step engines."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from llmserve.runtime.answer.generation import Constraint, Generation
from llmserve.runtime.answer.text_formatter import TextFormatter
from llmserve.runtime.errors import RequestError
from llmserve.runtime.protocols import Progress, Tokenizer


class Panic(BaseException):
    """Like pyo3's PanicException, which does not derive from Exception."""


class SlowConstraint:
    """Allows everything, once ``compiled`` is set; one that is not ``valid`` is refused then."""

    def __init__(self, compiled: Event, *, valid: bool) -> None:
        self._compiled, self._valid = compiled, valid

    @property
    def pending(self) -> bool:
        return not self._compiled.is_set()

    def settle(self) -> None:
        assert self._compiled.wait(10)
        if not self._valid:
            raise RequestError("compiling it takes too long")

    def __call__(self, scores: Any) -> None:
        self.settle()


class SlowFormatter(TextFormatter):
    """Constrains prompts that begin with ``slow``, and refuses those that begin with ``bomb``."""

    def __init__(self) -> None:
        super().__init__({}, Path())
        self.compiled = Event()

    def constrain(self, generation: Generation, tokenizer: Tokenizer) -> Constraint | None:
        word = bytes(generation.prompt_ids[:4])
        if word not in (b"slow", b"bomb"):
            return None
        return SlowConstraint(self.compiled, valid=word == b"slow")


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
            generation.constrain(np.zeros(256))
            logits = np.zeros(256) if generation.wants_logits else None
            token = generation.prompt_ids[position % len(generation.prompt_ids)]
            generation.push(token, logits)
            if generation.done:
                self.drop(generation)
        return progress
