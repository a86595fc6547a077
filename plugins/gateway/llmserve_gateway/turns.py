"""Who goes first of those that wait: one rule for all that wait in the gateway.

A class above goes first; a class is a number, and the lower one is above, as in vLLM. Within a
class, the keys that wait get tokens by their weights, in virtual time: what a key uses, divided by
its weight, puts it behind those that have used less. Who comes anew begins where the others are, so
it goes next. When nothing of a class waits or runs, what it has used is forgotten.

Nobody starves. Once a request has waited for :data:`LATE_AFTER` seconds, one turn in
:data:`LATE_EVERY` is of its class, or of another whose request has waited for even longer. And
within a class, a key has a turn at the latest when each of the others has used what one of its own
requests uses, and one request more, all by their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, Literal, NamedTuple, TypeVar

from llmserve.runtime.contract import LATE_AFTER, LATE_EVERY

WEIGHTS = range(1, 1001)
_NEWEST = 0.2
"""The weight of the last request's tokens in the mean of all."""


class Party(NamedTuple):
    """One of several keys, or of several models, that have no more than a share each."""

    kind: Literal["key", "model", "background"]
    name: str = ""

    def share(self, of: int) -> int:
        """Return what it may have of so many: a model more than others, as all keys use it."""
        quarters = 3 if self.kind == "model" else 2
        return min(of, max(1, of * quarters // 4))

    @property
    def in_words(self) -> str:
        return "in the background" if self.kind == "background" else f"of this {self.kind}"


IN_BACKGROUND = Party("background")
"""All requests that nobody waits for: they hold something for as long as it takes."""


class Standing(NamedTuple):
    """Whose request it is, by which weight that shares with others, and in which class it is."""

    name: str = ""
    weight: int = 1
    priority: int = 0
    """The class: the lower number goes first."""


NOBODY = Standing()
"""That of all requests, if there are no keys."""


@dataclass(eq=False)
class Waiter:
    """A request that waits, and what it has used when it has had its turn."""

    standing: Standing
    estimate: float
    """How many tokens it will use, as far as that is known."""
    since: float
    """When it began to wait."""
    used: float | None = None
    """How many tokens it has used, if that is known."""
    charged: float = 0.0
    """What counts until that is known."""


W = TypeVar("W", bound=Waiter)


@dataclass(eq=False)
class _Line(Generic[W]):
    """The requests of a key in a class, in the order of their arrival."""

    waiting: dict[W, None] = field(default_factory=dict)
    running: int = 0
    tag: float = 0.0
    """Its virtual time: what it has used, by its weight."""
    missed: float = 0.0
    """How many tokens more than estimated its requests use, in the mean."""

    def cost(self, waiter: W) -> float:
        return max(1.0, waiter.estimate + self.missed)


@dataclass(eq=False)
class _Class(Generic[W]):
    now: float = 0.0
    """The virtual time of its last turn."""
    lines: dict[str, _Line[W]] = field(default_factory=dict)

    def oldest(self) -> float | None:
        """Return since when a request of it waits, None if there is none."""
        first = (next(iter(line.waiting), None) for line in self.lines.values())
        return min((waiter.since for waiter in first if waiter is not None), default=None)


class Turns(Generic[W]):
    """Those that wait, and who has used what. It has no clock."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class[W]] = {}
        self._passed = LATE_EVERY - 1
        """How many turns there were since the last of a class that had waited too long."""

    def __iter__(self) -> Iterator[W]:
        for each in self._classes.values():
            for line in each.lines.values():
                yield from line.waiting

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def join(self, waiter: W) -> None:
        """Have a request wait."""
        group = self._classes.setdefault(waiter.standing.priority, _Class())
        line = group.lines.setdefault(waiter.standing.name, _Line())
        if not line.waiting:
            line.tag = max(line.tag, group.now)
        line.waiting[waiter] = None

    def leave(self, waiter: W) -> None:
        """Have a request wait no more, which has had no turn; nothing if it did not wait."""
        group = self._classes.get(waiter.standing.priority)
        line = group and group.lines.get(waiter.standing.name)
        if line and waiter in line.waiting:
            del line.waiting[waiter]
            self._forget(waiter.standing)

    def begin(self, waiter: W, now: float) -> None:
        """Note that a request has its turn."""
        group, line = self._place(waiter)
        oldest = group.oldest()
        is_late = oldest is not None and now - oldest >= LATE_AFTER
        self._passed = _after(self._passed, is_late)
        del line.waiting[waiter]
        line.running += 1
        group.now = max(group.now, line.tag)
        waiter.charged = line.cost(waiter)
        line.tag += waiter.charged / waiter.standing.weight

    def end(self, waiter: W) -> None:
        """Count what a request has used that had its turn."""
        _, line = self._place(waiter)
        line.running -= 1
        if waiter.used is not None:
            line.tag += (waiter.used - waiter.charged) / waiter.standing.weight
            if waiter.used:
                line.missed += (waiter.used - waiter.estimate - line.missed) * _NEWEST
        self._forget(waiter.standing)

    def order(self, now: float, may: Callable[[W], bool] = lambda _: True) -> Iterator[W]:
        """Yield those that wait in the order in which they go.

        Each is asked whether it ``may`` when it is its turn; who may not is overtaken.
        """
        heads = {number: heap for number, c in self._classes.items() if (heap := _heads(c))}
        passed = self._passed
        # Nobody comes to be late meanwhile.
        is_late = bool(heads) and _latest(heads, now) is not None
        while heads:
            late = _latest(heads, now) if is_late and passed >= LATE_EVERY - 1 else None
            number = min(heads) if late is None else late
            heap = heads[number]
            tag, _, name, waiter, others = heappop(heap)
            goes = may(waiter)
            if goes:
                tag += self._classes[number].lines[name].cost(waiter) / waiter.standing.weight
            if (following := next(others, None)) is not None:
                heappush(heap, (tag, following.since, name, following, others))
            if not heap:
                del heads[number]
            if goes:
                passed = _after(passed, late is not None)
                yield waiter

    def _place(self, waiter: W) -> tuple[_Class[W], _Line[W]]:
        group = self._classes[waiter.standing.priority]
        return group, group.lines[waiter.standing.name]

    def _forget(self, standing: Standing) -> None:
        """Forget what a class has used if nothing of it waits or runs: there is room then."""
        group = self._classes[standing.priority]
        line = group.lines[standing.name]
        if line.waiting or line.running:
            return
        if line.tag <= group.now:
            del group.lines[standing.name]
        if not any(each.waiting or each.running for each in group.lines.values()):
            del self._classes[standing.priority]


_Head = tuple[float, float, str, W, Iterator[W]]
"""The virtual time of a line, its first request and since when that waits, and the others."""


def _heads(group: _Class[W]) -> list[_Head[W]]:
    heap: list[_Head[W]] = []
    for name, line in group.lines.items():
        others = iter(line.waiting)
        if (first := next(others, None)) is not None:
            heap.append((line.tag, first.since, name, first, others))
    heapify(heap)
    return heap


def _latest(heads: Mapping[int, list[_Head[W]]], now: float) -> int | None:
    """Return the class whose request has waited for longest, and too long; None if none has."""
    since, number = min((min(head[1] for head in heap), n) for n, heap in heads.items())
    return number if now - since >= LATE_AFTER else None


def _after(passed: int, is_late: bool) -> int:
    """Return how many turns there were since that of a late class, after another turn."""
    return 0 if is_late and passed >= LATE_EVERY - 1 else min(passed + 1, LATE_EVERY - 1)
