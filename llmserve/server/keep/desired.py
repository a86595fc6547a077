"""What is wanted of a ``serve``: what users order, and what requests hold."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from llmserve.errors import LLMServeError, NotLoadedError


@dataclass(frozen=True)
class OnDemand:
    """How many models may be loaded at once, and for how long.

    ``memory`` is in bytes. A model that nobody uses for ``unload_after`` seconds is unloaded. The
    ``pinned`` ones are loaded from the start, and never make place for others.

    >>> OnDemand(max_loaded=2).pinned
    ()
    """

    max_loaded: int | None = None
    memory: float | None = None
    unload_after: float | None = None
    pinned: tuple[str, ...] = ()

    def allow(self, sizes: Iterable[float]) -> bool:
        """Return whether models of these sizes may be loaded at once."""
        sizes = list(sizes)
        enough = self.memory is None or sum(sizes) <= self.memory
        return enough and (self.max_loaded is None or len(sizes) <= self.max_loaded)


@dataclass(eq=False)
class Order:
    """What a user has ordered; ``done`` raises why it cannot be carried out."""

    do: Literal["load", "reload", "unload"]
    model: str
    parts: tuple[str, ...]
    """What the model is made of, by the files that are to be loaded."""
    done: asyncio.Future[None]


@dataclass(eq=False)
class Hold:
    """A use of a model, or the wait for it. ``granted`` raises why it cannot be loaded."""

    model: str
    granted: asyncio.Future[None]
    load: bool = True
    """Whether the model is loaded for it, if need be."""
    priority: int = 0
    """The class of who asks: models for the lower number are loaded first."""
    keep: float | None = None
    """For how many seconds the model is kept when it is not used any more, below 0 without end;
    None for what was said before."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when ``report`` returns something else."""
    place: int = 0
    """Which of the models that are still to be loaded it waits for, from 1."""
    going: bool = False
    """Whether the model has to go once it is not used any more."""

    def report(self) -> dict[str, Any]:
        """Return the state for who holds it, in another process."""
        if not self.granted.done():
            return {"place": self.place}
        if isinstance(error := self.granted.exception(), LLMServeError):
            code = getattr(error, "code", NotLoadedError.code)
            details = getattr(error, "details", {})
            return {"failed": error.problem, "hint": error.hint, "code": code, "details": details}
        return {"held": True, "going": self.going}

    def change(self, place: int, *, going: bool) -> None:
        if (place, going) != (self.place, self.going):
            self.place, self.going = place, going
            self.changed.set()

    def grant(self) -> None:
        if not self.granted.done():
            self.granted.set_result(None)
            self.changed.set()

    def refuse(self, error: LLMServeError) -> None:
        if not self.granted.done():
            self.granted.set_exception(error)
            # Nobody may ask for it any more.
            self.granted.exception()
            self.changed.set()


@dataclass
class Desired:
    """What is wanted besides what is up: who asks adds to it, and takes it away."""

    holds: list[Hold] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
