"""Decides which texts are computed together: they are padded to the longest among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# What a pass costs however short it is, in tokens: padding that costs more is not worth it.
_PASS = 128


def packs(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the positions of texts that share a pass, the shortest first.

    A pass has at most ``most`` tokens, padding included, or one text. A longer text joins shorter
    ones unless padding them would cost more than a pass of its own.
    """
    pack: list[int] = []
    for position in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[position]
        if pack:
            padding = len(pack) * (length - lengths[pack[-1]])
            if padding > _PASS or (len(pack) + 1) * length > most:
                yield pack
                pack = []
        pack.append(position)
    if pack:
        yield pack
