"""The states of sequences, and copies of them at borders of pages, for who begins alike."""

from __future__ import annotations

import itertools
from collections import OrderedDict

from llmserve.runtime.engine.runner import StateRunner


class States:
    """Numbers of a runner's states: one for each running sequence, and as many copies as fit.

    A copy is found by the number of the content before it. If there are too many, the one that was
    not used for longest goes. Those that are kept longer, as of sessions, go after all others; they
    are at most half, and what is over goes before all others.
    """

    def __init__(self, runner: StateRunner) -> None:
        self._runner = runner
        self._numbers = itertools.count()
        self._copies: dict[int, int] = {}
        self._others: OrderedDict[int, None] = OrderedDict()
        """The contents of the copies in the order in which they go."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Those that are kept longer, which go after that."""

    @property
    def are_copied(self) -> bool:
        return self._runner.most_copies > 0

    def __contains__(self, content: int) -> bool:
        return content in self._copies

    def copy_of(self, content: int | None) -> int | None:
        """Return the number of the copy that is kept of the state after a content, if there is."""
        return None if content is None else self._copies.get(content)

    def begin(self, content: int | None, *, longer: bool = False) -> int:
        """Return the number of a new state, which goes on after a content, or begins with none.

        The copy that it goes on from is used, and perhaps kept ``longer``.
        """
        number = next(self._numbers)
        if content is not None:
            self._use(content, longer=longer)
            self._runner.copy(self._copies[content], number)
        return number

    def keep(
        self, state: int, content: int, instead: int | None = None, *, longer: bool = False
    ) -> None:
        """Keep a copy of a state that is just after a content, perhaps instead of another's."""
        if instead is not None and instead in self._copies:
            self._drop(instead)
        is_new = content not in self._copies
        self._use(content, longer=longer)
        if not is_new:
            return
        while len(self._copies) >= self._runner.most_copies:
            order = itertools.chain(self._others, self._kept)
            self._drop(next(each for each in order if each != content))
        copy = next(self._numbers)
        self._runner.copy(state, copy)
        self._copies[content] = copy

    def _use(self, content: int, *, longer: bool) -> None:
        """Have a copy go last of its kind, which is the longer one if it was that once."""
        most = self._runner.most_copies // 2
        is_kept = most > 0 and (longer or content in self._kept)
        self._others.pop(content, None)
        self._kept.pop(content, None)
        (self._kept if is_kept else self._others)[content] = None
        while len(self._kept) > most:
            surplus, _ = self._kept.popitem(last=False)
            self._others[surplus] = None
            self._others.move_to_end(surplus, last=False)

    def _drop(self, content: int) -> None:
        self._others.pop(content, None)
        self._kept.pop(content, None)
        self._runner.forget(self._copies.pop(content))

    def end(self, state: int) -> None:
        self._runner.forget(state)
