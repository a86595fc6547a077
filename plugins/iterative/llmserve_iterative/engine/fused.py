"""Modules that do in several operations what PyTorch does in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_TANH_GELUS = ("NewGELUActivation", "GELUTanh", "FastGELUActivation", "PytorchGELUTanh")


class RootMeanSquareNorm(nn.Module):
    """The norm of Llama and its kin as one operation."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x over its root mean square, weighted."""
        return torch.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


def fuse(model: Any) -> None:
    """Replace modules by quicker ones that give the same."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            quicker = _quicker(child)
            if quicker is not None and _agree(child, quicker, model):
                setattr(parent, name, quicker)


def _quicker(module: Any) -> nn.Module | None:
    kind = type(module).__name__
    if kind in _TANH_GELUS:
        return nn.GELU(approximate="tanh")
    if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return RootMeanSquareNorm(module.weight, module.variance_epsilon)
    return None


@torch.inference_mode()
def _agree(one: Any, other: nn.Module, model: Any) -> bool:
    """Whether both make the same of a few numbers, to within what their type can tell."""
    weight = getattr(one, "weight", None)
    width = 64 if weight is None else weight.shape[-1]
    numbers = torch.linspace(-4, 4, width, dtype=model.dtype, device=model.device)[None]
    rough = 1e-5 if model.dtype == torch.float32 else 0.05
    return torch.allclose(one(numbers), other(numbers), rtol=rough, atol=rough)
