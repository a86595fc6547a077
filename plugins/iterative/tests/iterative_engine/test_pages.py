"""The books of the cache, whatever sequences do."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from llmserve_iterative.engine.pages import PagePool

SIZE = 2
COUNT = 6


class Held:
    """A sequence that computes its tokens page by page."""

    def __init__(self, ids: list[int], pages: list[int], before: int) -> None:
        self.ids, self.pages, self.before = ids, pages, before


class Books(RuleBasedStateMachine):
    """Sequences come, grow, share and go; what each page holds is written down beside."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(COUNT, SIZE)
        self.held: list[Held] = []
        self.memory: dict[int, tuple[int, ...]] = {}
        """Every token up to a page's end, as it was when the page was written."""

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def come(self, ids: list[int]) -> None:
        pages, before = self.pool.share(ids)
        for index, page in enumerate(pages):
            assert self.memory[page] == tuple(ids[: (index + 1) * SIZE])
        self.held.append(Held(ids, pages, before))

    @rule(which=st.randoms(use_true_random=False))
    def grow(self, which: object) -> None:
        unfinished = [one for one in self.held if (len(one.pages) + 1) * SIZE <= len(one.ids)]
        if not unfinished:
            return
        one = which.choice(unfinished)  # type: ignore[attr-defined]
        available = self.pool.available
        page = self.pool.take()
        assert (page is None) == (available == 0)
        if page is None:
            return
        assert not any(page in other.pages for other in self.held), "somebody writes to it"
        start = len(one.pages) * SIZE
        one.pages.append(page)
        self.memory[page] = tuple(one.ids[: start + SIZE])
        one.before = self.pool.publish(page, one.before, tuple(one.ids[start : start + SIZE]))

    @rule(which=st.randoms(use_true_random=False))
    def go(self, which: object) -> None:
        if self.held:
            one = which.choice(self.held)  # type: ignore[attr-defined]
            self.held.remove(one)
            self.pool.release(one.pages)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.pool.available == COUNT - len({p for one in self.held for p in one.pages})

    def teardown(self) -> None:
        for one in self.held:
            self.pool.release(one.pages)
        assert sorted(page for _ in range(COUNT) if (page := self.pool.take()) is not None) == list(
            range(COUNT)
        )
        assert self.pool.take() is None


Books.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBooks = Books.TestCase
