"""An engine without a model, for tests of the drivers that step one."""

from __future__ import annotations

import time
from threading import Event

from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Progress, Tokenizer


class Panic(BaseException):
    """As pyo3's PanicException, which is no Exception."""


class Echoes:
    """It repeats prompts for ever, a byte a step, when it is let.

    ``?`` is refused, ``!`` fails at its third token, ``#`` makes a step fail for everybody and
    ``~`` makes it panic.
    """

    eos_ids: frozenset[int] = frozenset()
    waiting = 0

    def __init__(self, context_length: int | None = None, pause: float = 0.0) -> None:
        self.context_length = context_length
        self.cache_tokens = context_length or 1_000_000_000
        self.pause = pause
        self.under_way: list[Generation] = []
        self.beside: list[int] = []
        self.may_step = Event()
        self.may_step.set()

    def stepper(self, tokenizer: Tokenizer) -> Echoes:
        return self

    @property
    def busy(self) -> bool:
        return bool(self.under_way)

    @property
    def live(self) -> int:
        return len(self.under_way)

    @property
    def cache_used(self) -> int:
        return sum(len(g.prompt_ids) + len(g.token_ids) for g in self.under_way)

    def admit(self, generation: Generation) -> None:
        if ord("?") in generation.prompt_ids:
            raise RequestError("no questions")
        self.under_way.append(generation)

    def drop(self, generation: Generation) -> None:
        self.under_way = [other for other in self.under_way if other is not generation]

    def step(self) -> Progress:
        assert self.may_step.wait(10)
        time.sleep(self.pause)
        self.beside.append(len(self.under_way))
        progress = Progress()
        for generation in list(self.under_way):
            at = len(generation.token_ids)
            if ord("#") in generation.prompt_ids:
                raise MemoryError("no memory left")
            if ord("~") in generation.prompt_ids:
                raise Panic("index out of bounds")
            if ord("!") in generation.prompt_ids and at == 2:
                progress.failed.append((generation, ValueError("cannot go on")))
                self.drop(generation)
                continue
            generation.push(generation.prompt_ids[at % len(generation.prompt_ids)])
            if generation.done:
                self.drop(generation)
        return progress
