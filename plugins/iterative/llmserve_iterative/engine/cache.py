"""The store in the shape of a transformers ``Cache``, so that any model's own code fills it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache


class Layout(Protocol):
    """Where a pass writes its keys and values, and what its attention then sees of them."""

    past: int
    width: int

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values and return those to attend to."""


class StepCache(Cache):  # type: ignore[misc]
    """A cache for one pass. transformers asks it for sizes and hands it keys and values."""

    def __init__(self, layout: Layout, layers: int) -> None:
        super().__init__(layers=[])
        self._layout = layout
        self._count = layers

    def __len__(self) -> int:
        return self._count

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write and return, as the layout has it."""
        return self._layout.update(layer, keys, values)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Return how many tokens came before this pass."""
        return self._layout.past

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        """Return the position of the first token of this pass."""
        return self._layout.past

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        """Return how many keys attention sees, and from where."""
        return self._layout.width, 0

    @property
    def is_sliding(self) -> list[bool]:
        """No layer forgets: windows are left to the mask."""
        return [False] * self._count

    is_linear = is_dummy = is_sliding

    @property
    def is_compileable(self) -> bool:
        """Its shapes change with every pass."""
        return False

    @property
    def is_initialized(self) -> bool:
        """There is nothing to prepare."""
        return True
