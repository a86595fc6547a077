"""The keys and values themselves: one tensor of each per layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmserve_iterative.engine.arena import Extent
from llmserve_iterative.engine.kernels import Kernels
from llmserve_iterative.engine.memory import zeros


class Places:
    """Where some tokens lie. An extent holds all of a head's tokens, then those of the next.

    So what attention reads of a sequence is close together, wherever its extent is.
    """

    def __init__(
        self, extents: Sequence[Extent], positions: Sequence[int], device: torch.device
    ) -> None:
        starts = [extent.start for extent in extents]
        sizes = [extent.size for extent in extents]
        self.table = torch.tensor([starts, sizes, list(positions)], device=device)
        self._starts, self._sizes, self._positions = self.table
        self._rows: dict[int, torch.Tensor] = {}

    def rows(self, heads: int) -> torch.Tensor:
        """Return the row of each head's each token, in a layer of so many heads."""
        if (found := self._rows.get(heads)) is None:
            head = torch.arange(heads, device=self._starts.device)[:, None]
            found = (self._starts * heads + self._sizes * head + self._positions).flatten()
            self._rows[heads] = found
        return found


class Store:
    """Keys and values by layer, as ``[rows, width]`` with a row per place and head.

    A layer's tensors are made when it first writes, for only then are its shapes known for
    every kind of model.
    """

    def __init__(self, places: int, dtype: torch.dtype, kernels: Kernels | None = None) -> None:
        self.places = places
        self.dtype = dtype
        self._kernels = kernels
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(
        self, layer: int, places: Places, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write tokens ``[heads, tokens, width]`` to their places; return the whole layer."""
        whole = self._layers.get(layer)
        if whole is None:
            whole = self._layers[layer] = self._new(keys), self._new(values)
        for tensor, new in zip(whole, (keys, values), strict=True):
            if self._kernels and new.dtype == self.dtype:
                self._kernels.keep(new, tensor, places.table)
                continue
            rows = places.rows(len(new))
            tensor.index_copy_(0, rows, new.to(self.dtype).reshape(len(rows), -1))
        return whole

    @torch.inference_mode()
    def copy(self, source: Extent, target: Extent, tokens: int) -> None:
        """Copy a sequence's first tokens from one extent to another, in every layer."""
        for whole in self._layers.values():
            for tensor in whole:
                heads = len(tensor) // self.places
                there, here = (
                    tensor[e.start * heads : e.stop * heads].view(heads, e.size, -1)
                    for e in (target, source)
                )
                there[:, :tokens] = here[:, :tokens]

    def _new(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros and not just any memory: attention multiplies masked values by nought, and
        # nought times infinity is no number.
        heads, _, width = like.shape
        return zeros(heads * self.places, width, dtype=self.dtype, device=like.device)
