"""The pages of the cache: which content goes first when there is no empty page left."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.runtime.engine.pages import PagePool

SIZE = 2


class Pool:
    """A pool, and what its sequences have written: what is found has to be that."""

    def __init__(self, count: int) -> None:
        self.pool = PagePool(count, SIZE)
        self.written: dict[int, list[int]] = {}
        self.held: list[tuple[list[int], bool]] = []

    def begin(self, ids: list[int], *, longer: bool = False) -> int | None:
        """Compute as many full pages as ids have; return how many were there, None without space.

        What could not begin gives back what it has shared, as in the scheduler.
        """
        pool = self.pool
        pages, content = pool.share(ids)
        found = len(pages)
        for number, page in enumerate(pages):
            assert self.written[page] == ids[: (number + 1) * SIZE], "of another text"
        if pool.pages_for(len(ids)) - found > pool.available:
            pool.release(pages, longer=longer)
            return None
        for start in range(found * SIZE, len(ids), SIZE):
            taken = pool.take(*pages[-1:], longer=longer)
            assert taken is not None
            assert not any(taken in others for others, _ in self.held)
            pages.append(taken)
            self.written[taken] = ids[: start + SIZE]
            content = pool.publish(taken, content, tuple(ids[start : start + SIZE]))
        self.held.append((pages, longer))
        return found

    def end(self, number: int = 0) -> None:
        pages, longer = self.held.pop(number)
        self.pool.release(pages, longer=longer)

    def answer(self, text: int, pages: int = 4, *, longer: bool = False) -> int | None:
        found = self.begin([text] * (pages * SIZE), longer=longer)
        self.end()
        return found

    def is_there(self, text: int, pages: int = 4) -> bool:
        """Return whether all of a text is, without using it."""
        return len(self.pool.contents([text] * (pages * SIZE))) == pages


@settings(max_examples=300, deadline=None)
@given(
    count=st.integers(1, 12),
    done=st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), max_size=6), st.booleans(), st.none() | st.integers(0, 5)
        ),
        max_size=40,
    ),
)
def test_whatever_is_kept_longer_what_is_found_is_right_and_no_page_is_lost(
    count: int, done: list[tuple[list[int], bool, int | None]]
) -> None:
    pool = Pool(count)
    for texts, longer, ends in done:
        pool.begin([each for text in texts for each in [text] * SIZE], longer=longer)
        held = {page for pages, _ in pool.held for page in pages}
        assert pool.pool.available == count - len(held)
        if ends is not None and pool.held:
            pool.end(ends % len(pool.held))
    while pool.held:
        pool.end()
    assert pool.pool.available == count
    taken = [pool.pool.take() for _ in range(count)]
    assert sorted(page for page in taken if page is not None) == list(range(count))
    assert pool.pool.take() is None


def test_a_session_outlives_any_number_of_others() -> None:
    pool = Pool(16)
    pool.answer(1, longer=True)
    pool.answer(2)
    for other in range(100, 200):
        pool.answer(other)
    assert pool.is_there(1)
    assert not pool.is_there(2)
    assert pool.answer(1, longer=True) == 4


@pytest.mark.parametrize("pages", [1, 2, 3, 4])
def test_a_flood_of_sessions_takes_no_more_than_half(pages: int) -> None:
    pool = Pool(32)
    for other in range(1, 5):
        pool.answer(other)
    for session in range(100, 300):
        pool.answer(session, pages, longer=True)
    # Who makes it too much takes its pages before there is anything to spare.
    assert sum(pool.is_there(other) for other in range(1, 5)) >= 2
    assert pool.is_there(299, pages)
    # Another may have all of the other half, and the sessions lose nothing.
    assert pool.answer(5, 16) == 0
    assert pool.is_there(5, 16)
    assert pool.is_there(299, pages)


def test_of_sessions_the_one_that_was_not_used_for_longest_goes_first() -> None:
    pool = Pool(16)
    for session in (1, 2, 1, 3):
        pool.answer(session, longer=True)
    for other in range(100, 110):
        pool.answer(other)
    assert [pool.is_there(session) for session in (1, 2, 3)] == [True, False, True]


def test_where_all_are_sessions_they_have_all_of_the_cache() -> None:
    pool = Pool(16)
    for _ in range(3):
        for session in (1, 2, 3, 4):
            pool.answer(session, longer=True)
    assert all(pool.is_there(session) for session in (1, 2, 3, 4))
    assert pool.answer(5, longer=True) == 0
    assert all(pool.is_there(session) for session in (3, 4, 5))


def test_of_a_session_that_is_too_long_its_beginning_stays() -> None:
    pool = Pool(16)
    pool.answer(1, 12, longer=True)
    for other in range(100, 120):
        pool.answer(other, 2)
    assert pool.answer(1, 12, longer=True) == 8


def test_what_a_session_shares_with_others_stays_with_it() -> None:
    pool = Pool(16)
    pool.begin([1] * 8)
    pool.begin([1] * 8, longer=True)
    pool.end(1)
    pool.end()
    pool.answer(1)
    for other in range(100, 120):
        pool.answer(other)
    assert pool.is_there(1)
