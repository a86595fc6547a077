"""Faster CPU replacements for modules of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

# With more rows a plain matrix product is as fast.
_FEW = range(1, 33)
_PANEL = 128


class FewRowsLinear(nn.Linear):
    """A linear layer that is fast for the few rows of a decoding step.

    A float32 matrix product first rearranges the weight, which takes longer than the product itself
    if there are few rows; with a single row, it mostly runs on one core. Many small products, each
    for some of the outputs, need no rearranging and are distributed over the cores.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        outputs, inputs = weight.shape
        super().__init__(inputs, outputs, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = bias  # type: ignore[assignment]
        split = outputs // _PANEL * _PANEL
        self._panels = weight[:split].view(-1, _PANEL, inputs).transpose(1, 2)
        self._rest = weight[split:].t()

    def forward(self, x: Tensor) -> Tensor:
        count = x.numel() // self.in_features
        if count not in _FEW or not len(self._panels):
            return super().forward(x)
        rows = x.reshape(count, -1)
        out = torch.bmm(rows.expand(len(self._panels), *rows.shape), self._panels)
        out = out.transpose(0, 1).reshape(count, -1)
        if self._rest.shape[1]:
            out = torch.cat([out, rows @ self._rest], dim=1)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], -1)


def speed_up(model: nn.Module) -> None:
    """Replace modules of a model with faster equivalents."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if replacement := _faster_equivalent(child):
                setattr(parent, name, replacement)


def _faster_equivalent(module: Any) -> nn.Module | None:
    if isinstance(module, NewGELUActivation):
        return nn.GELU(approximate="tanh")
    if not (type(module) is nn.Linear or type(module).__name__ in ("FalconLinear", "Conv1D")):
        return None
    weight: Tensor = module.weight.detach()
    transposed = isinstance(module, Conv1D)
    # GPT-2 stores its weights transposed.
    weight = (weight.t() if transposed else weight).contiguous()
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return FewRowsLinear(weight, module.bias)
    if not transposed:
        return None
    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = module.bias
    return linear
