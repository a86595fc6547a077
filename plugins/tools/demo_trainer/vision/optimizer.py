"""An optimizer for the matrices within layers, which needs fewer steps than Adam does.

It is Muon in float32 for all matrices of one shape together: PyTorch's own computes in bfloat16,
for each matrix alone, which on a CPU took longer than the network itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

_MOMENTUM = 0.95
_DECAY = 0.02
# Of the polynomial that brings all singular values near 1.
_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.775, 2.0315
_ROUNDS = 4


class Muon:
    """Changes matrices by steps whose singular values are about the same."""

    def __init__(self, matrices: Sequence[Any]) -> None:
        self.rate = 0.0
        self._groups: dict[Any, list[Any]] = defaultdict(list)
        for matrix in matrices:
            self._groups[matrix.shape].append(matrix)
        self._means = [
            [torch.zeros_like(each) for each in group] for group in self._groups.values()
        ]

    def state(self) -> list[list[torch.Tensor]]:
        return self._means

    def restore(self, means: list[list[torch.Tensor]]) -> None:
        self._means = means

    @torch.no_grad()
    def step(self) -> None:
        for means, (shape, group) in zip(self._means, self._groups.items(), strict=True):
            for mean, matrix in zip(means, group, strict=True):
                mean.lerp_(matrix.grad, 1 - _MOMENTUM)
            ahead = [
                matrix.grad.lerp(mean, _MOMENTUM) for mean, matrix in zip(means, group, strict=True)
            ]
            changes = _even(torch.stack(ahead)) * (0.2 * max(shape) ** 0.5 * self.rate)
            for matrix, change in zip(group, changes, strict=True):
                matrix.mul_(1 - self.rate * _DECAY).sub_(change)


def _even(matrices: torch.Tensor) -> Any:
    """Return matrices with the same singular vectors, whose singular values are about 1."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if is_tall else matrices
    found = found / (found.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ROUNDS):
        square = found @ found.mT
        found = _LINEAR * found + (_CUBIC * square + _QUINTIC * square @ square) @ found
    return found.mT if is_tall else found
