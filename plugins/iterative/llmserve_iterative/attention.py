"""The cache of keys and values, and attention that reads it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from llmserve.runtime import Chunk


class Rule(NamedTuple):
    """How a layer scales and caps attention scores, and how far back it looks."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None
    """How many tokens are a part of a text, of which each looks back on its own part alone."""


class Store:
    """Keys and values by layer, ``[rows, heads, width]``: a row for each token of each page.

    A layer's tensors are allocated when it first writes: only then are the shapes known for every
    kind of model.
    """

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self._rows, self._dtype = rows, dtype
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no layer has written yet."""
        return not self._layers

    def write(self, layer: int, rows: Tensor, *new: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values ``[heads, tokens, width]`` to their rows; return the layer's."""
        if layer not in self._layers:
            keys, values = (
                _zeros((self._rows, len(part), part.shape[2]), self._dtype, part.device)
                for part in new
            )
            self._layers[layer] = keys, values
        for stored, part in zip(self._layers[layer], new, strict=True):
            stored.index_copy_(0, rows, part.transpose(0, 1).to(self._dtype))
        return self._layers[layer]

    @property
    def form(self) -> str:
        """What a row is made of: the type and shapes of all parts; empty where they are none of
        this process's memory."""
        parts = [(layer, part) for layer, both in sorted(self._layers.items()) for part in both]
        if not parts or any(part.device.type != "cpu" for _, part in parts):
            return ""
        return f"{self._dtype} {[(layer, *part.shape[1:]) for layer, part in parts]}"

    def read(self, first: int, stop: int) -> bytes:
        """Return a copy of some rows of all layers."""
        return b"".join(part.tobytes() for part in self._memory(first, stop))

    def fill(self, first: int, stop: int, content: bytes) -> bool:
        """Put a copy of rows there; return whether it has the right size."""
        parts = self._memory(first, stop)
        if len(content) != sum(part.nbytes for part in parts):
            return False
        at = 0
        for part in parts:
            part[...] = np.frombuffer(content, np.uint8, part.nbytes, at).reshape(part.shape)
            at += part.nbytes
        return True

    def _memory(self, first: int, stop: int) -> list[npt.NDArray[np.uint8]]:
        return [
            part[first:stop].view(torch.uint8).numpy()
            for _, both in sorted(self._layers.items())
            for part in both
        ]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, not uninitialized memory: a kernel may multiply masked values by zero.

    On a CPU, the operating system gives memory to a page when it is first written; torch would
    write all of them.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)


class Tokens:
    """The tokens of a pass, sequence after sequence, and their rows in the cache."""

    def __init__(self, chunks: Sequence[Chunk], page_size: int, device: torch.device) -> None:
        tokens = [
            (token, at - chunk.fewer, chunk.pages[at // page_size] * page_size + at % page_size)
            for chunk in chunks
            for at, token in enumerate(chunk.ids, chunk.start)
        ]
        self.stacked = torch.tensor(list(zip(*tokens, strict=True)), device=device)
        self.ids, self.positions, self.rows = self.stacked
        self.starts = [0, *itertools.accumulate(len(chunk.ids) for chunk in chunks)]
        """Where each chunk begins among the tokens, and where the last one ends."""
        for chunk, start, stop in zip(chunks, self.starts, self.starts[1:], strict=False):
            if chunk.embedded and (own := chunk.positions()) is not None:
                if self.positions.ndim == 1:
                    # A token of a text has the same one on all axes.
                    self.positions = self.positions.repeat(len(own), 1)
                self.positions[:, start:stop] = torch.from_numpy(own)
        needed = [
            row
            for chunk, stop in zip(chunks, self.starts[1:], strict=True)
            for row in range(stop - chunk.rows, stop)
        ]
        # A pass of which no row is needed has one anyway: not every model computes none.
        self.needed = torch.tensor(needed or [0], device=device)
        self.windows: set[int] = set()
        """How far back the layers that have attended look, where that is limited."""


class FlashPlan:
    """Attention of one pass by PyTorch's kernel for CUDA, which reads the pages itself."""

    page_size = 256
    """The kernel supports no smaller pages."""
    sees_ahead = False
    """Whether tokens can see some that follow them, as those of an image may."""

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.tokens = Tokens(chunks, self.page_size, device)
        self.query_starts = torch.tensor(self.tokens.starts, dtype=torch.int32, device=device)
        self.lengths = torch.tensor([c.stop for c in chunks], dtype=torch.int32, device=device)
        tables = [torch.tensor(chunk.pages, dtype=torch.int32) for chunk in chunks]
        self.table = pad_sequence(tables, batch_first=True).to(device)
        self.max_queries = max(len(chunk.ids) for chunk in chunks)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        """Return ``[tokens, heads, width]`` for queries ``[heads, tokens, width]``."""
        if rule.softcap is not None:
            raise NotImplementedError("the kernel has no softcap")
        output = varlen_attn(
            query.transpose(0, 1),
            keys.view(-1, self.page_size, *keys.shape[1:]),
            values.view(-1, self.page_size, *values.shape[1:]),
            self.query_starts,
            None,
            self.max_queries,
            self.table.shape[1] * self.page_size,
            scale=rule.scale,
            window_size=(rule.window - 1 if rule.window else -1, 0),
            enable_gqa=len(query) != keys.shape[1],
            seqused_k=self.lengths,
            block_table=self.table,
        )
        return cast(Tensor, output)


class PagePlan:
    """Attention of one pass with PyTorch's usual operations, on any device.

    A sequence whose pages are adjacent, as they mostly are, is read in place.
    """

    page_size = 32
    sees_ahead = True

    def __init__(
        self, chunks: Sequence[Chunk], device: torch.device, page_size: int | None = None
    ) -> None:
        self.page_size = page_size or self.page_size
        self.tokens = Tokens(chunks, self.page_size, device)
        self._locations: list[tuple[Chunk, bool, int]] = []
        """Whether a chunk's sequence is read from a copy, and at which row it begins there."""
        scattered: list[int] = []
        for chunk in chunks:
            pages = chunk.pages[: -(-chunk.stop // self.page_size)]
            copied = pages != list(range(pages[0], pages[0] + len(pages)))
            first = len(scattered) if copied else pages[0]
            self._locations.append((chunk, copied, first * self.page_size))
            scattered += pages if copied else []
        self._counts = [len(chunk.ids) for chunk in chunks]
        self._scattered = torch.tensor(scattered, dtype=torch.long, device=device)
        self._masks: dict[tuple[Chunk, int | None, int | None], Tensor] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        (heads, count, width), kv_heads = query.shape, keys.shape[1]
        in_place = copies = [stored.transpose(0, 1)[None] for stored in (keys, values)]
        if len(self._scattered):
            copies = [self._copy(stored).transpose(0, 1)[None] for stored in (keys, values)]
        # Heads that share keys are treated as more queries: [tokens, heads of keys, these, width].
        queries = query.to(keys.dtype).transpose(0, 1).reshape(count, kv_heads, -1, width)
        outputs = []
        for (chunk, copied, first), rows in zip(
            self._locations, queries.split_with_sizes(self._counts), strict=True
        ):
            skipped, mask, chunk_query = 0, None, rows
            if not chunk.single:
                # The mask is the same for all heads, and a copy for each would be large.
                chunk_query = rows.permute(1, 2, 0, 3)
                mask = self._mask(chunk, rule, rows)
            elif rule.window:
                skipped = max(0, chunk.stop - rule.window)
            elif rule.chunk:
                skipped = chunk.start - chunk.start % rule.chunk
            start, length = first + skipped, chunk.stop - skipped
            source = copies if copied else in_place
            chunk_keys, chunk_values = (stored.narrow(2, start, length) for stored in source)
            if not chunk.single:
                chunk_keys, chunk_values = (
                    part.transpose(0, 1).expand(-1, rows.shape[2], -1, -1)
                    for part in (chunk_keys, chunk_values)
                )
            output = _attend(chunk_query, chunk_keys, chunk_values, mask, rule)
            if not chunk.single:
                output = output.permute(2, 0, 1, 3)
            outputs.append(output)
        return torch.cat(outputs).view(count, heads, -1)

    def _copy(self, stored: Tensor) -> Tensor:
        pages = stored.view(-1, self.page_size * stored.shape[1], stored.shape[2])
        return pages.index_select(0, self._scattered).view(-1, *stored.shape[1:])

    def _mask(self, chunk: Chunk, rule: Rule, query: Tensor) -> Tensor:
        """Return what to add to the scores of a chunk of several tokens."""
        key = chunk, rule.window, rule.chunk
        if (mask := self._masks.get(key)) is None:
            keys = torch.arange(chunk.stop, device=query.device)
            queries = keys[chunk.start :, None]
            hidden = keys > queries
            for part in chunk.wholes():
                if part.in_windows and not rule.window:
                    continue
                first = max(part.start, chunk.start)
                hidden[first - chunk.start : part.stop - chunk.start, first : part.stop] = False
            if rule.window:
                hidden |= keys <= queries - rule.window
            if rule.chunk:
                hidden |= keys < queries - queries % rule.chunk
            mask = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            self._masks[key] = mask
        return mask


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    if rule.softcap is None:
        return scaled_dot_product_attention(query, keys, values, mask, scale=rule.scale)
    # No fused kernel supports a softcap.
    scores = torch.tanh(query @ keys.transpose(2, 3) * (rule.scale / rule.softcap)) * rule.softcap
    return (scores if mask is None else scores + mask).softmax(-1) @ values
