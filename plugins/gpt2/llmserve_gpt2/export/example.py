"""Tensors to export with: no two lengths are equal, so that none is taken for another."""

from __future__ import annotations

import torch

from llmserve_gpt2.export.shape import Shape

_ROWS, _NEW, _HELD, _ROOM = 2, 3, 5, 11


def example(shape: Shape) -> tuple[torch.Tensor, ...]:
    """Return the arguments of a step: two rows, three new tokens, five held, three of a gap."""
    ids = torch.arange(_ROWS * _NEW).reshape(_ROWS, _NEW) % shape.vocabulary
    positions = torch.arange(_NEW).repeat(_ROWS, 1) + torch.tensor([[2], [1]])
    mask = torch.zeros((_ROWS, _ROOM), dtype=torch.int64)
    for row, start in enumerate((2, 1)):
        mask[row, _ROOM - _NEW - start :] = 1
    held = torch.zeros((_ROWS, _HELD), dtype=torch.int64)
    return ids, positions, mask, held, *shape.empty(_ROWS, _HELD)
