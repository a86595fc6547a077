"""What lives at the same time never shares memory."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from llmserve_iterative.engine.layout import Life, lay_out

lives = st.builds(
    lambda size, first, length: Life(size, first, first + length),
    st.integers(0, 300),
    st.integers(0, 20),
    st.integers(0, 6),
)


@given(st.lists(lives, max_size=25))
def test_two_that_live_at_the_same_time_lie_apart(asked: list[Life]) -> None:
    offsets, size = lay_out(asked)
    for (a, at_a), (b, at_b) in combinations(zip(asked, offsets, strict=True), 2):
        together = a.first <= b.last and b.first <= a.last
        apart = at_a + a.size <= at_b or at_b + b.size <= at_a
        assert apart or not together or not (a.size and b.size)
    assert all(
        at % 64 == 0 and at + life.size <= size for life, at in zip(asked, offsets, strict=True)
    )


def test_memory_is_used_again() -> None:
    chain = [Life(1000, step, step + 1) for step in range(50)]
    assert lay_out(chain)[1] <= 3 * 1024
