"""The states of sequences, and copies of them at borders of pages, for who begins alike."""

from __future__ import annotations

import itertools
from collections import OrderedDict

from llmserve.runtime.engine.runner import StateRunner


class States:
    """Numbers of a runner's states: one for each running sequence, and as many copies as fit.

    A copy is found by the number of the content before it. If there are too many, the one that was
    not used for longest goes.
    """

    def __init__(self, runner: StateRunner) -> None:
        self._runner = runner
        self._numbers = itertools.count()
        self._copies: OrderedDict[int, int] = OrderedDict()

    @property
    def are_copied(self) -> bool:
        return self._runner.most_copies > 0

    def __contains__(self, content: int) -> bool:
        return content in self._copies

    def begin(self, content: int | None) -> int:
        """Return the number of a new state, which goes on after a content, or begins with none."""
        number = next(self._numbers)
        if content is not None:
            self._copies.move_to_end(content)
            self._runner.copy(self._copies[content], number)
        return number

    def keep(self, state: int, content: int, instead: int | None = None) -> None:
        """Keep a copy of a state that is just after a content, perhaps instead of another's."""
        if instead is not None and (old := self._copies.pop(instead, None)) is not None:
            self._runner.forget(old)
        if content in self._copies:
            self._copies.move_to_end(content)
            return
        while len(self._copies) >= self._runner.most_copies:
            self._runner.forget(self._copies.popitem(last=False)[1])
        copy = next(self._numbers)
        self._runner.copy(state, copy)
        self._copies[content] = copy

    def end(self, state: int) -> None:
        self._runner.forget(state)
