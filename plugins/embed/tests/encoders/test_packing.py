"""Which texts share a pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve_embed.packing import packs

LENGTHS = st.lists(st.integers(1, 600), max_size=80)
COST = 32


def cost(passes: Iterable[Sequence[int]]) -> int:
    return sum(len(each) * max(each) + COST for each in passes)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 2000))
def test_each_text_is_in_one_pass_that_is_not_too_large(lengths: list[int], most: int) -> None:
    found = packs(lengths, most, COST)
    assert sorted(position for pack in found for position in pack) == list(range(len(lengths)))
    for pack in found:
        padded = len(pack) * max(lengths[position] for position in pack)
        assert padded <= most or len(pack) == 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(60, 200))
def test_no_other_division_is_cheaper(lengths: list[int], most: int) -> None:
    found = [[lengths[position] for position in pack] for pack in packs(lengths, most, COST)]
    ordered, inner = sorted(lengths), range(1, len(lengths))
    divisions = (
        [ordered[a:b] for a, b in pairwise([0, *cuts, len(lengths)])]
        for count in range(len(lengths))
        for cuts in combinations(inner, count)
    )
    allowed = [d for d in divisions if all(len(p) == 1 or len(p) * max(p) <= most for p in d)]
    assert cost(found) == min(map(cost, allowed))


def test_a_long_text_does_not_make_short_ones_wait() -> None:
    assert packs([512, 3, 4, 3], 4096, COST) == [[1, 3, 2], [0]]
    assert packs([], 4096, COST) == []
