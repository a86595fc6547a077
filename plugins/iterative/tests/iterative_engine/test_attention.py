"""Attention of a piece of a prompt whose heads share keys."""

from __future__ import annotations

import torch

from llmserve.runtime import Chunk
from llmserve_iterative.attention import PagePlan, Rule


def test_heads_that_share_keys_share_the_mask() -> None:
    """After a long prompt, a mask for each of them would be hundreds of megabytes."""
    before, count, heads, key_heads, width = 70, 58, 6, 2, 8
    torch.manual_seed(1)
    query = torch.randn(heads, count, width)
    keys, values = (torch.randn(256, key_heads, width) for _ in range(2))
    plan = PagePlan([Chunk([1] * count, before, [0, 1, 2, 3])], torch.device("cpu"))
    found = plan.attend(query, keys, values, Rule(0.4))

    length = before + count
    own = [part[:length].repeat_interleave(heads // key_heads, 1) for part in (keys, values)]
    scores = torch.einsum("hqw,khw->hqk", query, own[0]) * 0.4
    hidden = torch.arange(length) > torch.arange(before, length)[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khw->qhw", weights, own[1])
    torch.testing.assert_close(found, expected)
    assert [mask.shape for mask in plan._masks.values()] == [(count, length)]


def test_attention_within_parts_of_a_text() -> None:
    """Of a piece of a prompt over the borders of parts, and of a single token after it."""
    before, count, part, width = 70, 58, 32, 8
    torch.manual_seed(2)
    keys, values = (torch.randn(256, 2, width) for _ in range(2))
    queries = torch.randn(2, count + 1, width)
    pages, length, device = [0, 1, 2, 3, 4], before + count + 1, torch.device("cpu")
    rule = Rule(0.4, chunk=part)
    piece = PagePlan([Chunk([1] * count, before, pages)], device)
    single = PagePlan([Chunk([1], length - 1, pages)], device)
    found = torch.cat([
        piece.attend(queries[:, :-1], keys, values, rule),
        single.attend(queries[:, -1:], keys, values, rule),
    ])  # fmt: skip
    scores = torch.einsum("hqw,khw->hqk", queries, keys[:length]) * 0.4
    at, to = torch.arange(before, length)[:, None], torch.arange(length)
    hidden = (to > at) | (to // part != at // part)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    torch.testing.assert_close(found, torch.einsum("hqk,khw->qhw", weights, values[:length]))
