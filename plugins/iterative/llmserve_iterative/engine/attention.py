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
                torch.zeros(
                    self._rows, len(part), part.shape[2], dtype=self._dtype, device=part.device
                )
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
            keys.unflatten(0, (-1, self.page_size)),
            values.unflatten(0, (-1, self.page_size)),
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


class Span(NamedTuple):
    """Where a chunk's sequence lies, in the cache or among what was copied from it."""

    chunk: Chunk
    first: int
    copied: bool


class PagePlan:
    """Attention of one pass with PyTorch's usual operations, on any device.

    A sequence whose pages are neighbours, as they mostly are, is read where it lies.
    """

    page_size = 32

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.tokens = Tokens(chunks, self.page_size, device)
        self._spans: list[Span] = []
        scattered: list[int] = []
        for chunk in chunks:
            pages = chunk.pages[: -(-chunk.stop // self.page_size)]
            copied = pages != list(range(pages[0], pages[0] + len(pages)))
            first = len(scattered) if copied else pages[0]
            self._spans.append(Span(chunk, first * self.page_size, copied))
            scattered += pages if copied else []
        self._scattered = torch.tensor(scattered, device=device)
        self._masks: dict[tuple[Chunk, int | None], Tensor] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        """Return ``[tokens, heads, width]`` for queries ``[heads, tokens, width]``."""
        own = _by_head(keys), _by_head(values)
        copied = own
        if len(self._scattered):
            copied = _by_head(self._copy(keys)), _by_head(self._copy(values))
        # Heads that share keys are so many queries of one.
        query = query.to(keys.dtype).unflatten(0, (keys.shape[1], -1))
        singles = query.permute(2, 0, 1, 3).split(1)
        parts: list[Tensor] = []
        at = 0
        for chunk, first, is_copied in self._spans:
            back = 0
            if chunk.single:
                rows, mask = singles[at], None
                back = max(0, chunk.stop - rule.window) if rule.window else 0
            else:
                piece = query[:, :, at : at + chunk.stop - chunk.start]
                rows, mask = piece.flatten(1, 2)[None], self._mask(chunk, query, rule.window)
            at += chunk.stop - chunk.start
            first_key, count = first + back, chunk.stop - back
            seen = _attend(
                rows, *(t.narrow(2, first_key, count) for t in (copied if is_copied else own)),
                mask, rule,
            )  # fmt: skip
            if not chunk.single:
                seen = seen[0].unflatten(1, piece.shape[1:3]).permute(2, 0, 1, 3)
            parts.append(seen)
        return torch.cat(parts).flatten(1, 2)

    def _copy(self, whole: Tensor) -> Tensor:
        pages = whole.unflatten(0, (-1, self.page_size))
        return pages.index_select(0, self._scattered).flatten(0, 1)

    def _mask(self, chunk: Chunk, query: Tensor, window: int | None) -> Tensor:
        """Return what to add to the scores of a chunk of several tokens."""
        if (found := self._masks.get((chunk, window))) is None:
            seen = torch.arange(chunk.stop, device=query.device)
            at = seen[chunk.start :, None]
            hidden = seen > at
            if window:
                hidden |= seen <= at - window
            zeros = query.new_zeros(hidden.shape)
            found = zeros.masked_fill_(hidden, -torch.inf).repeat(query.shape[1], 1)
            self._masks[chunk, window] = found
        return found


def _by_head(whole: Tensor) -> Tensor:
    return whole.transpose(0, 1)[None]


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    if rule.softcap is None:
        return scaled_dot_product_attention(query, keys, values, mask, scale=rule.scale)
    # No fused kernel has this.
    scores = torch.tanh(query @ keys.transpose(2, 3) * (rule.scale / rule.softcap)) * rule.softcap
    return (scores if mask is None else scores + mask).softmax(-1) @ values
