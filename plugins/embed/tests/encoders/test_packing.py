"""Which texts share a pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmserve_embed.packing import packs

LENGTHS = st.lists(st.integers(1, 600), max_size=80)


@given(LENGTHS, st.integers(1, 2000))
def test_each_text_is_in_one_pass_that_is_not_too_large(lengths: list[int], most: int) -> None:
    found = list(packs(lengths, most))
    assert sorted(position for pack in found for position in pack) == list(range(len(lengths)))
    for pack in found:
        padded = len(pack) * max(lengths[position] for position in pack)
        assert padded <= most or len(pack) == 1


@given(LENGTHS)
def test_padding_never_costs_more_than_a_pass_each_time(lengths: list[int]) -> None:
    for pack in packs(lengths, 10**9):
        sizes = [lengths[position] for position in pack]
        steps = [i * (sizes[i] - sizes[i - 1]) for i in range(1, len(sizes))]
        assert sizes == sorted(sizes)
        assert max(steps, default=0) <= 128


def test_a_long_text_does_not_make_short_ones_wait() -> None:
    assert list(packs([512, 3, 4, 3], 4096)) == [[1, 3, 2], [0]]
