"""What models that are about to be unloaded still compute."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from llmserve.errors import ServerError
from llmserve.repository.repository import Repository
from llmserve.server.keep.kept import Kept

_LINGERS, _LINGERS_UNSEEN = 10.0, 60.0
"""Seconds after which a process of an unloaded model that does nothing is not needed any more; it
may wait for what Triton itself computes, which only shows when that is done."""


class Done(NamedTuple):
    """What models have done so far: only a change of it means something."""

    seconds: float
    answers: tuple[int, ...]


class Work:
    """Tells whether these models of ``kept`` work, also those that Triton itself runs."""

    def __init__(self, kept: Kept, names: Iterable[str]) -> None:
        self._kept = kept
        self._names = tuple(names)
        repository = Repository.open(kept.settings.repository)
        self._unseen = [
            name
            for name in self._names
            if repository.model(name).runs_in_triton and not kept.stubs.of(name)
        ]

    @property
    def lingers(self) -> float:
        return _LINGERS_UNSEEN if self._unseen else _LINGERS

    async def done(self) -> Done:
        """Return the time of processors, and how many requests what has no process has answered."""
        seconds = sum(map(self._kept.stubs.seconds, self._names))
        if not self._unseen:
            return Done(seconds, ())
        try:
            answers = await asyncio.to_thread(self._kept.server.answers)
        except ServerError:
            # It ends, or hangs.
            return Done(seconds, ())
        return Done(seconds, tuple(answers.get(name, 0) for name in self._unseen))
