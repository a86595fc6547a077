"""How the grammar chooses: never evenly, so that a greedy answer has a clear winner."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def pick(rng: Random, options: Sequence[T], turn: int = 0, ratio: float = 0.5) -> T:
    """Choose from ``options``, each ``ratio`` times as likely as the one before it.

    Even odds would leave the trained model with ties between its two best tokens,
    and a tie can fall either way when requests are batched. ``turn`` rotates the
    options first, so that different subjects have different favourites.

    >>> pick(Random(0), ["only"])
    'only'
    """
    start = turn % len(options)
    rotated = [*options[start:], *options[:start]]
    return rng.choices(rotated, [ratio**rank for rank in range(len(rotated))])[0]


def pick_index(rng: Random, count: int) -> int:
    """Choose a subject: the first ones somewhat more often, none of them rarely."""
    return rng.choices(range(count), [1 / (rank + 6) for rank in range(count)])[0]


def keep(rng: Random, sentences: Sequence[str], least: int, share: float = 0.8) -> list[str]:
    """Keep the first ``least`` sentences and, in order, about ``share`` of the others."""
    first, rest = sentences[:least], sentences[least:]
    return [*first, *(sentence for sentence in rest if rng.random() < share)]


def some(rng: Random, sentences: Sequence[str], share: float = 0.75) -> list[str]:
    """Cut the sentences short: each follows the one before it with probability ``share``."""
    count = 1
    while count < len(sentences) and rng.random() < share:
        count += 1
    return list(sentences[:count])
