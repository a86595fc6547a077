"""Decoding passes recorded as CUDA graphs, so that nothing but the device decides their pace."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from llmserve_iterative.engine.attention import FlashPlan
from llmserve_iterative.engine.scheduler import Chunk, detached_sequence

Forward = Callable[[], torch.Tensor]


class DecodeGraphs:
    """Passes of single tokens, one recorded for each number of sequences that is a round one.

    A pass of fewer is filled up with tokens that write to the spare page and that nobody reads.
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
            filling = Chunk(detached_sequence([0], pages), 0, 1)
            # Its tensors stay where they are, and every pass of this size is written there.
            inputs = FlashPlan([filling] * size, plan.table.device)
            self._passes[size] = inputs, _record(partial(self._forward, inputs))
        inputs, play = self._passes[size]
        inputs.tokens.numbers[:, :count] = plan.tokens.numbers
        inputs.tokens.rows[count:] = self._spare_page * plan.page_size
        inputs.lengths.fill_(1)[:count] = plan.lengths
        inputs.table.fill_(self._spare_page)[:count, :width] = plan.table
        return play()[:count]


def _record(run: Forward) -> Forward:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()

    def play() -> torch.Tensor:
        graph.replay()
        return logits

    return play
