"""The cache of keys and values, and attention that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from llmserve_iterative.engine.scheduler import Chunk


class Rule(NamedTuple):
    """What a layer makes of scores: how it scales and caps them, and how far back it looks."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class Store:
    """Keys and values by layer, ``[rows, heads, width]``: a row for each token of each page.

    A layer's tensors are made when it first writes, for only then are its shapes known for
    every kind of model.
    """

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self._rows, self._dtype = rows, dtype
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, rows: Tensor, *new: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values ``[heads, tokens, width]`` to their rows; return the layer's."""
        if layer not in self._layers:
            # Zeros and not just any memory: a kernel may multiply what it masks by nought.
            keys, values = (
                part.new_zeros((self._rows, len(part), part.shape[2]), dtype=self._dtype)
                for part in new
            )
            self._layers[layer] = keys, values
        for whole, part in zip(self._layers[layer], new, strict=True):
            whole.index_copy_(0, rows, part.transpose(0, 1).to(self._dtype))
        return self._layers[layer]


class Tokens:
    """The tokens of a pass, one sequence's behind the other's, and their rows in the cache."""

    def __init__(self, chunks: Sequence[Chunk], page_size: int, device: torch.device) -> None:
        each = [
            (token, at, chunk.pages[at // page_size] * page_size + at % page_size)
            for chunk in chunks
            for at, token in enumerate(chunk.sequence.tokens(chunk.start, chunk.stop), chunk.start)
        ]
        self.numbers = torch.tensor(list(zip(*each, strict=True)), device=device)
        self.ids, self.positions, self.rows = self.numbers
        counts = torch.tensor([chunk.stop - chunk.start for chunk in chunks])
        self.starts = functional.pad(counts.cumsum(0), (1, 0)).to(device)
        """Where each chunk begins among them, and where the last ends."""


class FlashPlan:
    """Attention of one pass by PyTorch's kernel for CUDA, which reads the pages itself."""

    page_size = 256
    """The kernel knows no smaller pages."""

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.tokens = Tokens(chunks, self.page_size, device)
        self.query_starts = self.tokens.starts.to(torch.int32)
        self.lengths = torch.tensor([c.stop for c in chunks], dtype=torch.int32, device=device)
        tables = [torch.tensor(chunk.pages, dtype=torch.int32) for chunk in chunks]
        self.table = pad_sequence(tables, batch_first=True).to(device)
        self.most_queries = max(chunk.stop - chunk.start for chunk in chunks)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        """Return ``[tokens, heads, width]`` for queries ``[heads, tokens, width]``."""
        if rule.softcap is not None:
            raise NotImplementedError("the kernel has no softcap")
        seen = varlen_attn(
            query.transpose(0, 1),
            keys.view(-1, self.page_size, *keys.shape[1:]),
            values.view(-1, self.page_size, *values.shape[1:]),
            self.query_starts,
            None,
            self.most_queries,
            self.table.shape[1] * self.page_size,
            scale=rule.scale,
            window_size=(rule.window - 1 if rule.window else -1, 0),
            enable_gqa=len(query) != keys.shape[1],
            seqused_k=self.lengths,
            block_table=self.table,
        )
        return cast(Tensor, seen)


class PagePlan:
    """Attention of one pass with PyTorch's usual operations, on any device.

    A sequence whose pages are neighbours, as they mostly are, is read where it lies.
    """

    page_size = 32

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.tokens = Tokens(chunks, self.page_size, device)
        self._places: list[tuple[Chunk, bool, int]] = []
        """Whether a chunk's sequence is read from a copy, and at which row it begins there."""
        scattered: list[int] = []
        for chunk in chunks:
            pages = chunk.pages[: -(-chunk.stop // self.page_size)]
            copied = pages != list(range(pages[0], pages[0] + len(pages)))
            first = len(scattered) if copied else pages[0]
            self._places.append((chunk, copied, first * self.page_size))
            scattered += pages if copied else []
        self._counts = [chunk.stop - chunk.start for chunk in chunks]
        self._scattered = torch.tensor(scattered, dtype=torch.long, device=device)
        self._masks: dict[tuple[Chunk, int | None], Tensor] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        (heads, count, width), shared = query.shape, keys.shape[1]
        in_place = copies = [whole.transpose(0, 1)[None] for whole in (keys, values)]
        if len(self._scattered):
            copies = [self._copy(whole).transpose(0, 1)[None] for whole in (keys, values)]
        # Heads that share keys are so many queries of one: [tokens, heads of keys, these, width].
        queries = query.to(keys.dtype).transpose(0, 1).reshape(count, shared, -1, width)
        parts = []
        for (chunk, copied, first), rows in zip(
            self._places, queries.split_with_sizes(self._counts), strict=True
        ):
            back, mask, asked = 0, None, rows
            if not chunk.single:
                asked = rows.permute(1, 2, 0, 3).reshape(1, shared, -1, width)
                mask = self._mask(chunk, rule.window, asked)
            elif rule.window:
                back = max(0, chunk.stop - rule.window)
            known, told = copies if copied else in_place
            start, length = first + back, chunk.stop - back
            seen = _attend(
                asked, known.narrow(2, start, length), told.narrow(2, start, length), mask, rule
            )
            if not chunk.single:
                seen = seen.view(shared, -1, len(rows), seen.shape[3]).permute(2, 0, 1, 3)
            parts.append(seen)
        return torch.cat(parts).view(count, heads, -1)

    def _copy(self, whole: Tensor) -> Tensor:
        pages = whole.view(-1, self.page_size * whole.shape[1], whole.shape[2])
        return pages.index_select(0, self._scattered).view(-1, *whole.shape[1:])

    def _mask(self, chunk: Chunk, window: int | None, rows: Tensor) -> Tensor:
        """Return what to add to the scores of a chunk of several tokens."""
        if (found := self._masks.get((chunk, window))) is None:
            seen = torch.arange(chunk.stop, device=rows.device)
            at = seen[chunk.start :, None]
            hidden = seen > at
            if window:
                hidden |= seen <= at - window
            found = rows.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            found = self._masks[chunk, window] = found.repeat(rows.shape[2] // len(at), 1)
        return found


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    if rule.softcap is None:
        return scaled_dot_product_attention(query, keys, values, mask, scale=rule.scale)
    # No fused kernel has this.
    scores = torch.tanh(query @ keys.transpose(2, 3) * (rule.scale / rule.softcap)) * rule.softcap
    return (scores if mask is None else scores + mask).softmax(-1) @ values
