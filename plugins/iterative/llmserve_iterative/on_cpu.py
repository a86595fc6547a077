"""The GPU path of ``iterative`` on a CPU: passes are repeated, not recorded; the kernel replaced.

The replacement does what the kernel's documentation says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from llmserve_iterative import attention, graphs


def reference_kernel(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_starts: torch.Tensor,
    _key_starts: None,
    max_queries: int,
    max_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """Do what ``torch.nn.attention.varlen.varlen_attn`` is documented to do."""
    assert keys.is_contiguous()
    assert window_size[1] == 0
    assert enable_gqa == (query.shape[1] != keys.shape[2])
    assert {t.dtype for t in (query_starts, seqused_k, block_table)} == {torch.int32}
    out = torch.empty_like(query)
    for row, (start, stop) in enumerate(itertools.pairwise(query_starts)):
        length, count = int(seqused_k[row]), int(stop - start)
        assert count <= max_queries
        assert length <= max_keys
        own = [part[block_table[row].long()].flatten(0, 1)[:length] for part in (keys, values)]
        own = [part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in own]
        scores = torch.einsum("qhd,khd->hqk", query[start:stop], own[0]) * scale
        query_positions = torch.arange(length - count, length)[:, None]
        key_positions = torch.arange(length)
        hidden = key_positions > query_positions
        if window_size[0] >= 0:
            hidden |= key_positions < query_positions - window_size[0]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, own[1])
    return out


@contextmanager
def replaced() -> Iterator[list[int]]:
    """Make the GPU path run here; yield how often passes were recorded and replayed."""
    counts = [0, 0]

    def record(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        counts[0] += 1
        memory = run()

        def replay() -> torch.Tensor:
            counts[1] += 1
            # A graph writes to the memory that it was recorded with.
            return memory.copy_(run())

        return replay

    with ExitStack() as stack:
        for home, name, replacement in (
            (attention, "varlen_attn", reference_kernel),
            (attention.FlashPlan, "page_size", 16),
            (graphs, "_record", record),
        ):
            stack.enter_context(mock.patch.object(home, name, replacement))
        yield counts
