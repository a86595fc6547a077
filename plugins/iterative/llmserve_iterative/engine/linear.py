"""Modules that compute on a CPU what the model's own do, in less time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

# With more rows a plain product is as fast.
_FEW = range(2, 33)
_PANEL = 64


class FewRowsLinear(nn.Linear):
    """A linear layer that is quick with the few rows of a decoding step.

    A product of float32 matrices first rearranges the weight, which takes longer than the product
    with few rows. Many small products, of some outputs each, do without. A weight with more
    outputs than inputs is kept input by input: with a single row that is read faster.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, shared: bool) -> None:
        outputs, inputs = weight.shape
        super().__init__(inputs, outputs, device="meta")
        if outputs > inputs and not shared:
            weight = weight.t().contiguous().t()
        elif not shared:
            weight = weight.contiguous()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = bias  # type: ignore[assignment]
        whole = outputs // _PANEL * _PANEL
        self._panels = weight[:whole].unflatten(0, (-1, _PANEL)).transpose(1, 2) if whole else None
        self._rest = weight[whole:].t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.numel() // self.in_features
        if count not in _FEW or self._panels is None:
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
    """Replace modules of a model by quicker ones that give the same."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if quicker := _quicker(child, embeddings):
                setattr(parent, name, quicker)


def _quicker(module: Any, embeddings: set[int]) -> nn.Module | None:
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
        return FewRowsLinear(weight, module.bias, shared=id(module.weight) in embeddings)
    if isinstance(module, Conv1D):
        linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
        linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        linear.bias = module.bias
        return linear
    return None
