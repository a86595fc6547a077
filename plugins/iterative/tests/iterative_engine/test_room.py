"""The books kept about the cache."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from llmserve_iterative.engine.arena import Arena, Extent, rounded
from llmserve_iterative.engine.prefixes import Prefix, Prefixes, shared


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=60))
def test_extents_never_overlap(wishes: list[tuple[int, bool]]) -> None:
    arena = Arena(256)
    held: list[Extent] = []
    for size, leave in wishes:
        if (extent := arena.take(size)) is not None:
            held.append(extent)
        if leave and held:
            arena.free(held.pop(0))
        in_order = sorted(held)
        assert all(a.stop <= b.start for a, b in pairwise(in_order))
        assert all(e.start >= 0 and e.stop <= 256 for e in held)
        assert arena.used == sum(e.size for e in held)


def test_the_lowest_gap_that_is_wide_enough() -> None:
    arena = Arena(64)
    first, _, third, _ = (arena.take(16) for _ in range(4))
    assert first is not None
    assert third is not None
    arena.free(third)
    assert arena.take(32) is None
    assert arena.gap(32, without=[Extent(16, 16)]) == 16
    assert arena.take(16) == third
    arena.free(first)
    assert arena.take(16) == first


def test_rounded() -> None:
    assert [rounded(n) for n in (1, 16, 17)] == [16, 16, 32]


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_shared(one: list[int], other: list[int]) -> None:
    length = shared(one, other)
    assert one[:length] == other[:length]
    assert min(len(one), len(other)) == length or one[length] != other[length]


def test_the_longest_prefix_is_found_and_the_oldest_forgotten() -> None:
    prefixes = Prefixes()
    short, long = (Prefix(tuple(range(n)), Extent(n, n)) for n in (20, 40))
    other = Prefix((9,) * 30, Extent(200, 30))
    prefixes.keep(short)
    prefixes.keep(other)
    assert prefixes.best([*range(30), 99]) == (short, 20)
    assert prefixes.best([5, 6, 7]) is None
    assert prefixes.keep(long) == [short.extent]
    assert prefixes.best([*range(30), 99]) == (long, 30)
    assert prefixes.forget_oldest() == other.extent
    assert prefixes.extents == [long.extent]
