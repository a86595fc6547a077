"""Decoding passes recorded as CUDA graphs, so that only the device limits their speed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from llmserve.runtime import Chunk
from llmserve_iterative.attention import FlashPlan

Forward = Callable[[], torch.Tensor]


class DecodeGraphs:
    """Passes of single tokens, recorded for a few padded numbers of sequences.

    A smaller pass is padded with tokens that write to the spare page and are never read.
    """

    def __init__(self, forward: Callable[[FlashPlan], torch.Tensor], spare_page: int) -> None:
        self._forward = forward
        self._spare_page = spare_page
        self._passes: dict[int, tuple[FlashPlan, Forward]] = {}

    def run(self, plan: FlashPlan) -> torch.Tensor:
        count, width = plan.table.shape
        size = next((small for small in (1, 2, 4, 8) if small >= count), -(-count // 8) * 8)
        if size not in self._passes or self._passes[size][0].table.shape[1] < width:
            pages = [self._spare_page] * (1 << (width - 1).bit_length())
            padding = Chunk([0], 0, pages)
            # A graph always reads the same tensors, so each pass of this size is copied there.
            inputs = FlashPlan([padding] * size, plan.table.device)
            self._passes[size] = inputs, _record(partial(self._forward, inputs))
        inputs, replay = self._passes[size]
        inputs.tokens.stacked[:, :count] = plan.tokens.stacked
        inputs.tokens.rows[count:] = self._spare_page * plan.page_size
        inputs.lengths.fill_(1)[:count] = plan.lengths
        inputs.table.fill_(self._spare_page)[:count, :width] = plan.table
        return replay()[:count]


def _record(run: Forward) -> Forward:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay
