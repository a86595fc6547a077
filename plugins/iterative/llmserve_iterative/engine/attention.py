"""Attention of the tokens of one pass, each to the sequence it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from llmserve_iterative.engine.arena import Extent
from llmserve_iterative.engine.kernels import Kernels
from llmserve_iterative.engine.span import Span

WASTE = 64
"""Reading so many tokens of padding costs about as much as one more call."""


@dataclass
class Run:
    """Sequences in extents of one size and at even distances, read as one tensor."""

    extent: Extent
    stride: int
    lengths: list[int]

    def takes(self, span: Span) -> bool:
        """Whether one more sequence fits in, and is better read together than alone."""
        count, width = len(self.lengths), max(self.lengths)
        gap = span.extent.start - self.extent.start - self.stride * (count - 1)
        if span.extent.size != self.extent.size or (count > 1 and gap != self.stride):
            return False
        padding = max(width, span.stop) * (count + 1) - width * count - span.stop
        return padding <= WASTE

    def add(self, span: Span) -> None:
        """Take one more sequence in."""
        if len(self.lengths) == 1:
            self.stride = span.extent.start - self.extent.start
        self.lengths.append(span.stop)

    def read(self, whole: torch.Tensor, heads: int, first: int = 0) -> torch.Tensor:
        """Return ``[sequences, heads, tokens, width]`` of a layer, without copying."""
        width = whole.shape[1]
        return whole.as_strided(
            (len(self.lengths), heads, max(self.lengths) - first, width),
            (self.stride * heads * width, self.extent.size * width, width, 1),
            (self.extent.start * heads + first) * width,
        )


class Plan:
    """How the tokens of one pass attend; made once and used by every layer.

    Spans of one token come first, and those in the order of their places.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        places: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: tuple[Kernels, torch.Tensor] | None = None,
    ) -> None:
        self._places, self._dtype, self._device = places, dtype, device
        self._kernels = kernels
        self._runs: list[Run] = []
        self._pieces = [span for span in spans if span.stop - span.start > 1]
        for span in spans:
            if span.stop - span.start > 1 or kernels:
                continue
            if self._runs and self._runs[-1].takes(span):
                self._runs[-1].add(span)
            else:
                self._runs.append(Run(span.extent, 0, [span.stop]))
        self._singles = len(spans) - len(self._pieces)
        ends = list(range(self._singles))
        for piece in self._pieces:
            ends.append((ends[-1] if ends else -1) + piece.stop - piece.start)
        self.last = torch.tensor(ends, device=device)
        self._masks: dict[tuple[int, int | None], tuple[int, torch.Tensor | None]] = {}

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Return ``[tokens, heads, width]`` for queries ``[heads, tokens, width]``."""
        heads = len(keys) // self._places
        parts = []
        if self._kernels and self._singles:
            kernels, table = self._kernels
            singles = query[:, : self._singles]
            parts.append(kernels.attend(singles, keys, values, table, window, scale, softcap))
        parts += self._attend_runs(query, keys, values, scale, window, softcap)
        done = self._singles
        for index, piece in enumerate(self._pieces, len(self._runs)):
            stop = done + piece.stop - piece.start
            mask = self._mask_of_piece(index, piece, window)
            run = Run(piece.extent, 0, [piece.stop])
            own = [run.read(whole, heads).to(self._dtype) for whole in (keys, values)]
            if (group := len(query) // heads) > 1:
                own = [part.repeat_interleave(group, 1) for part in own]
            rows = query[None, :, done:stop].to(self._dtype)
            seen = attend(rows, own[0], own[1], mask, scale, softcap)
            parts.append(seen[0].transpose(0, 1).to(query.dtype))
            done = stop
        if blank := query.shape[1] - done:
            parts.append(parts[0].new_zeros(blank, *parts[0].shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_runs(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Iterator[torch.Tensor]:
        """Yield what single tokens see, for want of kernels of our own."""
        heads = len(keys) // self._places
        group = len(query) // heads
        done = 0
        for index, run in enumerate(self._runs):
            stop = done + len(run.lengths)
            first, mask = self._mask_of_run(index, window)
            # The heads that share a key head stand as queries of one sequence: nothing is copied.
            rows = query[:, done:stop].transpose(0, 1).reshape(stop - done, heads, group, -1)
            own = run.read(keys, heads, first), run.read(values, heads, first)
            seen = attend(rows.to(self._dtype), *own, mask, scale, softcap)
            yield seen.flatten(1, 2).to(query.dtype)
            done = stop

    def _mask_of_run(self, index: int, window: int | None) -> tuple[int, torch.Tensor | None]:
        """Return from where on a run is read, and what of that not."""
        if (found := self._masks.get((index, window))) is None:
            lengths = self._runs[index].lengths
            first = max(0, min(lengths) - window) if window else 0
            found = first, None
            if min(lengths) != max(lengths):
                stops = torch.tensor(lengths, device=self._device)[:, None] - first
                seen = torch.arange(max(lengths) - first, device=self._device)
                visible = seen < stops
                if window:
                    visible &= seen >= stops - window
                found = first, self._additive(visible)[:, None, None]
            self._masks[index, window] = found
        return found

    def _mask_of_piece(self, index: int, piece: Span, window: int | None) -> torch.Tensor | None:
        if (found := self._masks.get((index, window))) is None:
            at = torch.arange(piece.start, piece.stop, device=self._device)[:, None]
            seen = torch.arange(piece.stop, device=self._device)
            visible = seen <= at
            if window:
                visible &= seen > at - window
            found = 0, self._additive(visible)
            self._masks[index, window] = found
        return found[1]

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~visible, -torch.inf)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return attention's output; with a softcap, which no fused kernel has, step by step."""
    if softcap is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = torch.tanh(query @ keys.transpose(-1, -2) * (scale / softcap)) * softcap
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return weights @ values
