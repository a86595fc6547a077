"""Whether models answer: what counts as a death, as silence and as slow, for whoever asks.

How much silence and how many deaths are allowed is in :mod:`llmserve.server.keep.states`.
``serve`` asks the models of its Tritons, and its frontends ask ``serve``; a gateway without a
``serve`` asks with the same :class:`Monitor`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Protocol

from llmserve.contract.report import State as State
from llmserve.contract.tasks import GENERATE
from llmserve.contract.tensors import TEXT_PAIR
from llmserve.errors import (
    LLMServeError,
    ModelDiedError,
    ModelFailedError,
    RequestRejectedError,
    UsageError,
)
from llmserve.server.keep.states import MISSES
from llmserve.server.keep.states import Watch as Watch
from llmserve.server.run.activity import BUSY

INTERVAL = 5.0
"""Seconds between two checks; a model that was idle since the last is asked for a token."""
SLOW = 10.0
"""Seconds after which a model that does not compute either is silent."""
SLOW_UNSEEN = 30.0
"""The same for who cannot see whether it computes: for others, perhaps."""
SLOW_FRONTEND = 5.0
"""Seconds within which a frontend must react to a request, even on a busy machine."""
BACK_EVERY, BACK_WITHIN = 0.5, 5.0
"""How often a Triton that has failed a request is asked whether it is back, and for how long."""


class Finding(Enum):
    """What the failure of a request says of the model."""

    REFUSED = "it is alive: it has read the request"
    FAILED = "it is alive, but failed"
    SILENT = "it does not answer, or nobody does for it"
    DIED = "its process has died, says Triton"


def finding(error: LLMServeError) -> Finding:
    if isinstance(error, ModelDiedError):
        return Finding.DIED
    if isinstance(error, ModelFailedError):
        return Finding.FAILED
    if isinstance(error, RequestRejectedError):
        return Finding.REFUSED
    return Finding.REFUSED if isinstance(error, UsageError) else Finding.SILENT


class Asking(Protocol):
    """What a monitor needs of :class:`llmserve.client.AsyncClient`."""

    async def model(self, name: str) -> Any: ...
    async def generate(
        self, model: str, prompt: str = "", *, timeout: float | None = None, **options: Any
    ) -> Any: ...
    async def compute(
        self,
        model: str,
        texts: list[str],
        *,
        pairs: list[str] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Any: ...


async def ask_for_token(client: Asking, model: str, timeout: float) -> None:
    """Ask a model for a token, or a value if it answers with such; raise what prevents that."""
    info = await client.model(model)
    if info.task == GENERATE:
        await client.generate(model, "a", max_tokens=1, timeout=timeout)
    elif info.task:
        pairs = ["a"] if TEXT_PAIR.name in info.inputs else None
        await client.compute(model, ["a"], pairs=pairs, timeout=timeout)


async def have_read(client: Asking, model: str, system: str, timeout: float) -> int:
    """Have a model read the beginning of the conversations with this system prompt.

    Return how many tokens it is. A template may need a user's message as well: what it makes of the
    system's is in pages that any other conversation finds, up to where the user's begin.
    """
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "a"}]
    began = time.monotonic()
    while True:
        try:
            info = await client.model(model)
            if info.task != GENERATE:
                raise UsageError("only models that answer with text read prompts ahead")
            answer = await client.generate(model, messages=messages, max_tokens=1, timeout=timeout)
        except LLMServeError as error:
            # Triton says a moment earlier that a model is loaded than it takes requests.
            is_late = finding(error) in (Finding.DIED, Finding.SILENT)
            if not is_late or time.monotonic() - began > BACK_WITHIN:
                raise
            await asyncio.sleep(BACK_EVERY)
        else:
            return int(answer.input_tokens or 0)


class Asked(Protocol):
    """A model whose state follows from what it answers, as :class:`Watch` is one."""

    @property
    def name(self) -> str: ...
    @property
    def alive(self) -> bool: ...
    def answered(self, now: float, /) -> None: ...
    def missed(self, now: float, why: str, /) -> None: ...
    def died(self, now: float, why: str, /) -> None: ...


class Evidence(Protocol):
    """What shows that a model is alive without asking it."""

    async def answers(self) -> Mapping[str, int]:
        """Return how many requests each model has answered."""

    def seconds(self) -> Mapping[str, float]:
        """Return the processor time that each model has used, if that can be seen."""

    def load_number(self, name: str) -> int:
        """Return a number that is another one once a model's process has been replaced."""

    def has_processes(self, name: str) -> bool:
        """Return whether all processes of a model are seen to run."""


class Monitor:
    """Asks the ``models`` that have been idle for a token, and keeps their states.

    With ``strict``, a model that fails the request is silent. Otherwise it is alive: restarted, it
    might fail it again.
    """

    def __init__(
        self,
        client: Callable[[], Asking],
        models: Callable[[], Iterable[Asked]],
        evidence: Evidence,
        *,
        slow: float,
        strict: bool = False,
    ) -> None:
        self._client = client
        self._models = models
        self._evidence = evidence
        self._slow = slow
        self._alive = (Finding.REFUSED,) if strict else (Finding.REFUSED, Finding.FAILED)
        self._checked_at = 0.0
        self._answers: Mapping[str, int] = {}
        self._seconds: Mapping[str, float] = {}
        self._failures: dict[str, list[str]] = {}
        self._in_flight: Counter[str] = Counter()

    def is_asking_for(self, name: str) -> bool:
        """Return whether a model has not answered its canary yet."""
        return self._in_flight[name] > 0

    def failing(self, name: str) -> str:
        """Return why a model fails its canaries, or "" if it does not do so repeatedly."""
        failures = self._failures.get(name, [])
        return failures[-1] if len(failures) >= MISSES else ""

    async def check(self) -> None:
        answers, seconds = await self._evidence.answers(), self._evidence.seconds()
        canaries = []
        for model in self._models():
            if self._has_worked(model.name, answers, seconds):
                model.answered(time.monotonic())
                self._failures.pop(model.name, None)
            else:
                canaries.append(self._send_canary(model))
        await asyncio.gather(*canaries)
        self._answers = await self._evidence.answers()
        self._seconds = self._evidence.seconds()
        self._checked_at = time.monotonic()

    def _has_worked(
        self, name: str, answers: Mapping[str, int], seconds: Mapping[str, float]
    ) -> bool:
        """Return whether a model has answered or computed since the last check."""
        used = seconds.get(name, 0.0) - self._seconds.get(name, 0.0)
        busy = self._checked_at and used > BUSY * (time.monotonic() - self._checked_at)
        return bool(busy) or answers.get(name, -1) > self._answers.get(name, -1) >= 0

    async def _send_canary(self, model: Asked) -> None:
        self._in_flight[model.name] += 1
        try:
            await self._ask(model)
        finally:
            self._in_flight[model.name] -= 1

    async def _ask(self, model: Asked) -> None:
        name, client = model.name, self._client()
        load_number = self._evidence.load_number(name)
        try:
            info = await client.model(name)
            if not info.task:
                return
            await ask_for_token(client, name, self._slow)
            self._failures.pop(name, None)
        except LLMServeError as error:
            found, why = finding(error), error.problem
            if found is Finding.DIED:
                if not self._evidence.has_processes(name):
                    # Certain, unless the answer is about a process that has been replaced since.
                    if model.alive and self._evidence.load_number(name) == load_number:
                        model.died(time.monotonic(), "its process has died")
                    return
                # Triton says the same of one that only hangs.
                why = "its process does not respond"
            if found not in self._alive:
                answers = await self._evidence.answers()
                if not self._has_worked(name, answers, self._evidence.seconds()):
                    # If it is loaded again meanwhile, that was about a process that has gone.
                    if model.alive and self._evidence.load_number(name) == load_number:
                        model.missed(time.monotonic(), why)
                    return
            if found is Finding.FAILED:
                self._failures[name] = [*self._failures.get(name, ()), why][-MISSES:]
        model.answered(time.monotonic())
