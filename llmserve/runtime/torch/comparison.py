"""Compares what a runner computes with what the model itself computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from llmserve.runtime.engine.runner import Chunk, Runner

# How far below the likeliest token the compared ones are at most.
_RANGE = 12
# As many tokens as are enough, and as a part of a model has.
_TOKENS = 4096
_LAST = 6
"""How many tokens of a text are computed one by one."""


def random_texts(config: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Return texts of these lengths, or of the model's context if that is shorter."""
    config = config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or max(lengths)
    rng = np.random.default_rng(0)
    count = min(config.vocab_size, _TOKENS)
    return [rng.integers(count, size=min(length, context)).tolist() for length in lengths]


def pages_of(texts: Sequence[Sequence[int]], page_size: int) -> int:
    """Return how many pages texts take together."""
    return sum(-(-len(text) // page_size) for text in texts)


def off_by(rows: Any, logits: Any) -> float:
    """Return the largest difference between log-probabilities, infinity if one is no number."""
    import torch

    expected = logits.float().log_softmax(-1)
    if expected.isnan().any():
        return float("inf")
    # Of the likeliest tokens: a product's last digits are large where a score is far below.
    likely = expected >= expected.max(dim=-1, keepdim=True).values - _RANGE
    found = torch.as_tensor(rows).log_softmax(-1)
    return float((found - expected)[likely].abs().nan_to_num(torch.inf).max())


def scores(runner: Runner, texts: Sequence[list[int]]) -> list[Any]:
    """Compute texts together, each in pieces and then token by token, in pages not in order."""
    pages = _pages(texts, runner.page_size)
    rows: list[list[Any]] = [[] for _ in texts]
    pieces = [list(_pieces(len(text))) for text in texts]
    while any(pieces):
        chunks = []
        for number, (text, left) in enumerate(zip(texts, pieces, strict=True)):
            if left:
                start, stop = left.pop(0)
                owned = pages[number][: -(-stop // runner.page_size)]
                chunk = Chunk(text[start:stop], start, owned, stop - start, state=number)
                chunks.append((number, chunk))
        # Single tokens come first, as in the engine.
        chunks.sort(key=lambda each: not each[1].single)
        logits, row = runner.run([chunk for _, chunk in chunks]), 0
        for number, chunk in chunks:
            for _ in chunk.ids:
                rows[number].append(logits.row(row).copy())
                row += 1
    return [np.stack(each) for each in rows]


def _pages(texts: Sequence[Sequence[int]], page_size: int) -> list[list[int]]:
    """Return pages for each text, taken in turns from both ends."""
    free = list(range(pages_of(texts, page_size)))
    return [
        [free.pop(0 if page % 2 else -1) for page in range(-(-len(text) // page_size))]
        for text in texts
    ]


def _pieces(length: int) -> Iterator[tuple[int, int]]:
    """Return two pieces of a text, then its last tokens one by one."""
    singles = range(max(1, length - _LAST), length)
    starts = sorted({0, max(1, singles[0] // 2), *singles, length})
    return itertools.pairwise(starts)
