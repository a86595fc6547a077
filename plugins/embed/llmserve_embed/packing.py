"""Decides which texts are computed together: they are padded to the longest among them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GPU_PASS_COST = 2048
"""In tokens: a GPU computes hundreds of them in the time that it takes to begin a pass."""


def packs(lengths: Sequence[int], most: int, pass_cost: int) -> list[list[int]]:
    """Return the positions of texts that share a pass, the shortest first.

    A pass has at most ``most`` tokens, padding included, or one text. Of all ways to divide the
    texts in the order of their lengths it is the cheapest, if a pass costs its tokens, padding
    included, and as much as ``pass_cost`` tokens besides.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    # The cheapest way to compute the first texts, and where its last pass begins.
    costs, begins = np.zeros(len(order) + 1), [0] * (len(order) + 1)
    for stop, position in enumerate(order, 1):
        longest = max(1, lengths[position])
        first = max(0, stop - max(1, most // longest))
        rows = np.arange(stop - first, 0, -1)
        found = costs[first:stop] + rows * longest + pass_cost
        begins[stop] = first + int(found.argmin())
        costs[stop] = found.min()
    passes, stop = [], len(order)
    while stop:
        passes.append(order[begins[stop] : stop])
        stop = begins[stop]
    return passes[::-1]
