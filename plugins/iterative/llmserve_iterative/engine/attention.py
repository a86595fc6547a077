"""The paged cache of keys and values, and attention that reads it."""

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
    """Keys and values by layer, as ``[pages, heads, tokens of a page, width]``.

    A layer's tensors are made when it first writes, for only then are its shapes known for
    every kind of model.
    """

    def __init__(
        self, page_count: int, page_size: int, dtype: torch.dtype, *, tokens_first: bool = False
    ) -> None:
        self.page_count = page_count
        self.page_size = page_size
        self.dtype = dtype
        self._tokens_first = tokens_first
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(
        self, layer: int, tokens: Tokens, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write tokens ``[heads, tokens, width]`` to their places; return the whole layer."""
        if layer not in self._layers:
            self._layers[layer] = self._new(keys), self._new(values)
        whole = self._layers[layer]
        for tensor, new in zip(whole, (keys, values), strict=True):
            tensor[tokens.pages, :, tokens.slots] = new.transpose(0, 1).to(self.dtype)
        return whole

    def _new(self, like: Tensor) -> Tensor:
        # Zeros and not just any memory: attention multiplies masked values by nought, and
        # nought times infinity is no number.
        heads, _, width = like.shape
        if self._tokens_first:
            shape = self.page_count, self.page_size, heads, width
            return torch.zeros(shape, dtype=self.dtype, device=like.device).transpose(1, 2)
        shape = self.page_count, heads, self.page_size, width
        return torch.zeros(shape, dtype=self.dtype, device=like.device)


class Tokens:
    """The tokens of a pass, one sequence's behind the other's, and where in the cache they go."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self.ids, self.positions, self.pages, self.slots = numbers

    @classmethod
    def of(cls, chunks: Sequence[Chunk], page_size: int, device: torch.device) -> Tokens:
        rows = [
            (token, at, chunk.pages[at // page_size], at % page_size)
            for chunk in chunks
            for at, token in enumerate(chunk.sequence.tokens(chunk.start, chunk.stop), chunk.start)
        ]
        return cls(torch.tensor(list(zip(*rows, strict=True)), device=device))


class FlashPlan:
    """Attention of one pass by PyTorch's kernel for CUDA, which reads the pages itself."""

    page_size = 256
    """The kernel knows no smaller pages."""
    tokens_first = True

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.tokens = Tokens.of(chunks, self.page_size, device)
        counts = torch.tensor([chunk.stop - chunk.start for chunk in chunks])
        self.query_starts = functional.pad(counts.cumsum(0), (1, 0)).to(device, torch.int32)
        self.last = self.query_starts[1:] - 1
        self.lengths = torch.tensor([c.stop for c in chunks], dtype=torch.int32, device=device)
        tables = [torch.tensor(chunk.pages, dtype=torch.int32) for chunk in chunks]
        self.table = pad_sequence(tables, batch_first=True).to(device)
        self.most_queries = int(counts.max())

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        """Return ``[tokens, heads, width]`` for queries ``[heads, tokens, width]``."""
        if rule.softcap is not None:
            raise NotImplementedError("the kernel has no softcap")
        seen = varlen_attn(
            query.transpose(0, 1),
            keys.transpose(1, 2),
            values.transpose(1, 2),
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

    Nothing is copied for the sequences of which there is one token, as there is in most passes:
    each page is multiplied with its owner's query where it lies, neighbouring pages at once.
    """

    page_size = 32
    tokens_first = False

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self._device = device
        self.tokens = Tokens.of(chunks, self.page_size, device)
        counts = torch.tensor([chunk.stop - chunk.start for chunk in chunks])
        self.last = (counts.cumsum(0) - 1).to(device)
        singles = [chunk for chunk in chunks if chunk.single]
        self._pieces = chunks[len(singles) :]
        self._singles = len(singles)
        self._arrange(singles)
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def _arrange(self, singles: Sequence[Chunk]) -> None:
        """Put the pages of the singles in an order in which neighbours stand together."""
        self._width = max((len(chunk.pages) for chunk in singles), default=0)
        uses: dict[int, int] = {}
        held = []
        for row, chunk in enumerate(singles):
            for index, page in enumerate(chunk.pages):
                # Who shares a page with others is looked after behind them.
                uses[page] = uses.get(page, 0) + 1
                held.append((uses[page], page, row, index))
        held.sort()
        self._runs: list[tuple[int, int, int]] = []
        for at, (_, page, _, _) in enumerate(held):
            start, stop, first = self._runs[-1] if self._runs else (0, 0, -1)
            if stop and page == first + stop - start:
                self._runs[-1] = start, at + 1, first
            else:
                self._runs.append((at, at + 1, page))
        numbers = [(row, row * self._width + index, index) for _, _, row, index in held]
        table = torch.tensor(numbers, device=self._device).view(-1, 3)
        self._owners, self._places, self._indices = table.unbind(1)
        self._lengths = torch.tensor([chunk.stop for chunk in singles], device=self._device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        """Return ``[tokens, heads, width]`` for queries ``[heads, tokens, width]``."""
        query = query.to(keys.dtype)
        parts = []
        if done := self._singles:
            singles = query[:, :done]
            parts.append(self._attend_singles(singles, keys, values, rule))
        for index, piece in enumerate(self._pieces):
            stop = done + piece.stop - piece.start
            pages = torch.tensor(piece.pages, device=self._device)
            first, second = (
                whole.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, : piece.stop]
                for whole in (keys, values)
            )
            mask = self._mask(index, rule.window)
            parts.append(_attend(query[:, done:stop], first, second, mask, rule))
            done = stop
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_singles(self, query: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        """Multiply page by page; only the softmax has to see a sequence as a whole."""
        rows, width, size = self._singles, self._width, self.page_size
        heads = keys.shape[1]
        group = len(query) // heads
        own = (query * rule.scale).transpose(0, 1).index_select(0, self._owners)
        scores = self._by_page(own.reshape(-1, group, query.shape[2]), keys.transpose(2, 3))
        if rule.softcap is not None:
            scores = torch.tanh(scores / rule.softcap) * rule.softcap
        scores = scores.view(-1, heads, group, size) + self._mask(-1, rule.window)[:, None, None]
        table = scores.new_full((rows * width, heads, group, size), -torch.inf)
        table.index_copy_(0, self._places, scores)
        whole = table.view(rows, width, heads, group, size).permute(0, 2, 3, 1, 4)
        weights = whole.reshape(rows, heads, group, -1).softmax(-1)
        weights = weights.view(rows, heads, group, width, size).permute(0, 3, 1, 2, 4)
        weights = weights.reshape(rows * width, heads, group, size).index_select(0, self._places)
        seen = self._by_page(weights.view(-1, group, size), values)
        out = seen.new_zeros(rows, len(query) * values.shape[3])
        out.index_add_(0, self._owners, seen.view(len(self._owners), -1))
        return out.view(rows, len(query), -1)

    def _by_page(self, rows: Tensor, pages: Tensor) -> Tensor:
        """Multiply the rows of each page, heads one after the other, with the page."""
        heads = pages.shape[1]
        out = rows.new_empty(*rows.shape[:2], pages.shape[3])
        for start, stop, first in self._runs:
            here = slice(start * heads, stop * heads)
            torch.bmm(rows[here], pages[first : first + stop - start].flatten(0, 1), out=out[here])
        return out

    def _mask(self, piece: int, window: int | None) -> Tensor:
        """Return what to add to scores, in a piece or (-1) in the pages of the singles."""
        if (found := self._masks.get((piece, window))) is None:
            if piece < 0:
                slots = torch.arange(self.page_size, device=self._device)
                seen = (self._indices * self.page_size)[:, None] + slots
                at = self._lengths[self._owners][:, None] - 1
            else:
                start, stop = self._pieces[piece].start, self._pieces[piece].stop
                seen = torch.arange(stop, device=self._device)
                at = torch.arange(start, stop, device=self._device)[:, None]
            hidden = seen > at
            if window:
                hidden |= seen <= at - window
            found = torch.zeros(hidden.shape, device=self._device).masked_fill_(hidden, -torch.inf)
            self._masks[piece, window] = found
        return found


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, rule: Rule) -> Tensor:
    """Return ``[tokens, heads, width]``; with a softcap, which no fused kernel has, by hand."""
    group = len(query) // len(keys)
    mask = mask.to(query.dtype)
    if rule.softcap is None:
        seen = scaled_dot_product_attention(
            query[None], keys[None], values[None], mask, scale=rule.scale, enable_gqa=group > 1
        )[0]
    else:
        keys, values = (part.repeat_interleave(group, 0) for part in (keys, values))
        scores = torch.tanh(query @ keys.transpose(1, 2) * (rule.scale / rule.softcap))
        seen = (scores * rule.softcap + mask).softmax(-1) @ values
    return seen.transpose(0, 1)
