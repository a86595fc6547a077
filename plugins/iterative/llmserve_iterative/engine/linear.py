"""Modules that compute on a CPU what the model's own do, in less time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

# From so few rows on, a plain product is as fast.
_FEW = range(2, 16)
_PANEL = 32


class FewRowsLinear(nn.Linear):
    """A linear layer that is quick with the few rows of a decoding step.

    A product of float32 matrices first rearranges the weight, which takes longer than the product
    with few rows. Many small products, of some outputs each, do without.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], device="meta")
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        self.bias = bias  # type: ignore[assignment]
        whole = weight.shape[0] // _PANEL * _PANEL
        self._panels = self.weight[:whole].view(-1, _PANEL, weight.shape[1]).transpose(1, 2)
        self._rest = self.weight[whole:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) not in _FEW:
            return super().forward(x)
        out = torch.bmm(rows.expand(len(self._panels), *rows.shape), self._panels)
        out = out.transpose(0, 1).reshape(len(rows), -1)
        if len(self._rest):
            out = torch.cat([out, rows @ self._rest.t()], dim=1)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], -1)


def speed_up(model: nn.Module) -> None:
    """Replace modules of a model by quicker ones that give the same."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if quicker := _quicker(child):
                setattr(parent, name, quicker)


def _quicker(module: Any) -> nn.Module | None:
    if isinstance(module, NewGELUActivation):
        return nn.GELU(approximate="tanh")
    if type(module) is nn.Linear or type(module).__name__ == "FalconLinear":
        weight = module.weight.detach()
    elif isinstance(module, Conv1D):
        # GPT-2 keeps its weights the other way round.
        weight = module.weight.detach().t()
    else:
        return None
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return FewRowsLinear(weight, module.bias)
    if isinstance(module, Conv1D):
        linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
        linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        linear.bias = module.bias
        return linear
    return None
