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
