"""Ends requests to a model whose process has died: Triton, which they were sent to, never does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from llmserve.client import ModelInfo
from llmserve.errors import ModelDiedError
from llmserve.server import ModelReport
from llmserve_gateway.errors import from_llmserve

_INTERVAL = 1.0
"""Seconds between two questions to `serve`, as long as a request is answered."""


@dataclass(eq=False)
class _Waiting:
    """A request that is being answered, by a model or by its parts."""

    models: frozenset[str]
    died: asyncio.Future[str]


class Deaths:
    """Hears from `serve` which processes have died, while requests are answered."""

    def __init__(self, reports: Callable[[], Awaitable[Sequence[ModelReport]]]) -> None:
        self._reports = reports
        self._waiting: set[_Waiting] = set()
        self._watching: asyncio.Task[None] | None = None

    async def unless_it_dies(self, info: ModelInfo, answering: Awaitable[None]) -> None:
        """Wait for the end of an answer, or raise an error if it cannot end any more."""
        answer = asyncio.ensure_future(answering)
        try:
            with self._listening(info) as died:
                either: set[asyncio.Future[Any]] = {answer, died}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    problem = f"the process of {info.name!r} died while it answered"
                    hint = f"send the request again ({died.result()})"
                    raise from_llmserve(ModelDiedError(problem, hint=hint))
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
        await answer

    @contextmanager
    def _listening(self, info: ModelInfo) -> Iterator[asyncio.Future[str]]:
        died = asyncio.get_running_loop().create_future()
        waiting = _Waiting(frozenset((info.name, *info.parts)), died)
        self._waiting.add(waiting)
        if self._watching is None or self._watching.done():
            # A separate context, because a request's trace does not include this.
            self._watching = Context().run(asyncio.ensure_future, self._watch())
        try:
            yield died
        finally:
            self._waiting.discard(waiting)
            died.cancel()

    async def _watch(self) -> None:
        restarts: dict[str, int] = {}
        while self._waiting:
            for report in await self._reports():
                name, count = report.name, report.restarts
                # A process may have come back between two questions.
                if report.state.has_ended or restarts.get(name, count) != count:
                    self._tell(name, report.why or "it was started again")
                restarts[name] = count
            await asyncio.sleep(_INTERVAL)

    def _tell(self, name: str, why: str) -> None:
        for waiting in self._waiting:
            if name in waiting.models and not waiting.died.done():
                waiting.died.set_result(why)
