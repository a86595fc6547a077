"""The experts of a layer, with their weights as they are stored.

transformers has all experts of a layer in one module, with one tensor for each kind of weight.
OpenVINO computes only the experts that a token is sent to if all are written down for every token
in the one form that it knows: the tokens once for each expert, products with a stack of weights,
and a sum by the routing's weights, which are zero for most.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openvino.frontend.pytorch import ConversionExtension, ModuleExtension
from torch import Tensor
from torch.nn import functional
from transformers.integrations.moe import ExpertsInterface

from llmserve.graphs.library import openvino as ov

_PRODUCT = "llmserve::product"
_NAMES = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
_LOOPED = ("LongcatFlashExperts", "DbrxExperts")
"""Their experts are computed by a loop that a trace would have for the tokens of its example alone;
those of the first beyond the weights return what they get."""


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module is one whose computation transformers lets others do."""
    if type(module).__name__ in _LOOPED:
        return True
    return hasattr(module, "is_transposed") and getattr(module, "down_proj", None) is not None


class StoredExperts:
    """The experts of one layer; ``folder`` is where weights go that have to be arranged anew."""

    def __init__(self, module: Any, folder: Path | None) -> None:
        self.module = module
        self.bias = None
        if type(module).__name__ in _LOOPED:
            _describe(module)
        gate = getattr(type(module), "_apply_gate", None)
        self._has_own_gate = gate is not None and gate.__module__ != ExpertsInterface.__module__
        self._total = getattr(module, "total_experts", module.num_experts)
        # There may be experts without weights, which are counted last.
        stored = {
            name: getattr(module, name).detach()[: module.num_experts]
            for name in _NAMES
            if hasattr(module, name)
        }
        self._biases = {
            name: getattr(module, f"{name}_bias").detach().float()
            for name in stored
            if module.has_bias
        }
        # As products have them: [experts, outputs, inputs].
        axes = {name: (1, 2) if module.is_transposed else () for name in stored}
        self._weights: dict[str, Tensor] = {}
        for name, weight in stored.items():
            whole = weight.transpose(*axes[name]) if axes[name] else weight
            if name == "gate_up_proj" and self._is_split:
                parts = dict(zip(("gate_proj", "up_proj"), whole.chunk(2, dim=1), strict=True))
            else:
                parts = {name: whole}
            self._weights |= {
                part: each if each.is_contiguous() else _placed(each, folder)
                for part, each in parts.items()
            }
            # The stored one is not needed any longer where it was arranged anew.
            setattr(module, name, _placeholder(weight.shape))

    @property
    def _is_split(self) -> bool:
        """Whether the gate is one product and what it lets through another."""
        return bool(self.module.is_concatenated) and not self._has_own_gate

    @property
    def weights(self) -> list[Tensor]:
        return list(self._weights.values())

    def hide(self) -> None:
        """Have the stored weights where a trace finds them."""
        for name, weight in self._weights.items():
            parameter = torch.nn.Parameter(weight, requires_grad=False)
            self.module.register_parameter(f"stored_{name}", parameter)

    def extension(self) -> ModuleExtension:
        """Return how OpenVINO is to read this module."""
        return ModuleExtension(
            self.module,
            _PRODUCT,
            convert=self._traced,
            evaluate=lambda _, values, weight: values.new_full(
                (*values.shape[:-1], weight.shape[1]), 0.5
            ),
        )

    def shape_only(self, hidden: Tensor, *_: Any) -> Tensor:
        """Return a tensor that has the shape of the answer, and nothing of it."""
        return torch.full_like(hidden, 0.5)

    def compute(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Return what the experts answer in float32, with one of them widened at a time."""
        if hidden.ndim > 2:
            return self.compute(hidden.flatten(0, -2), chosen, shares).view_as(hidden)
        answer = torch.zeros_like(hidden)
        # A number beyond the experts stands for none.
        for expert in range(self.module.num_experts):
            tokens, place = torch.where(chosen == expert)
            if len(tokens):
                rows = self._answer(
                    hidden[tokens], partial(self._product_of, expert), partial(_row, expert)
                )
                answer.index_add_(0, tokens, rows * shares[tokens, place, None])
        if self._total > self.module.num_experts:
            answer += hidden * (shares * (chosen >= self.module.num_experts)).sum(-1, keepdim=True)
        return answer

    def _product_of(self, expert: int, values: Tensor, name: str) -> Tensor:
        return functional.linear(values, self._weights[name][expert].float())

    def _traced(
        self, module: Any, target: Callable[..., Tensor],
        hidden: Tensor, chosen: Tensor, shares: Tensor,
    ) -> Tensor:  # fmt: skip
        if hidden.ndim > 2:
            rows = self._traced(module, target, hidden.flatten(0, -2), chosen, shares)
            return rows.view(hidden.shape)
        count, (tokens, width) = module.num_experts, hidden.shape
        tiled = hidden.repeat(count, 1).view(count, tokens, width)

        def product(values: Tensor, name: str) -> Tensor:
            return target(values, getattr(module, f"stored_{name}"))

        rows = self._answer(tiled, product, lambda bias: bias[:, None])
        rows = rows.view(count, tokens, width)
        weights = torch.zeros(tokens, self._total).scatter(1, chosen, shares)
        own = weights[:, :count] if self._total > count else weights
        answer = (rows * own.transpose(0, 1)[..., None]).sum(dim=0)
        if self._total > count:
            answer = answer + hidden * weights[:, count:].sum(dim=1, keepdim=True)
        return answer

    def _answer(
        self, values: Tensor, product: Callable[[Tensor, str], Tensor],
        part: Callable[[Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        module = self.module

        def project(values: Tensor, name: str) -> Tensor:
            rows = product(values, name)
            return rows + part(self._biases[name]) if name in self._biases else rows

        if not module.has_gate:
            middle = module.act_fn(project(values, "up_proj"))
        elif "gate_proj" in self._weights:
            middle = module.act_fn(project(values, "gate_proj")) * project(values, "up_proj")
        else:
            middle = module._apply_gate(project(values, "gate_up_proj"))
        rows = project(middle, "down_proj")
        return module.post_expert_norm(rows) if module.has_post_expert_norm else rows


def _describe(module: Any) -> None:
    """Say of a module what transformers says of those whose computation it lets others do."""
    if type(module).__name__ == "DbrxExperts":
        own = module.mlp
        module.act_fn = own.activation_fn
        for name, weight in (("gate_proj", own.w1), ("up_proj", own.v1), ("down_proj", own.w2)):
            whole = weight.detach().view(module.num_experts, -1, module.hidden_size)
            setattr(module, name, whole.transpose(1, 2) if name == "down_proj" else whole)
        for name in ("w1", "v1", "w2"):
            setattr(own, name, _placeholder(getattr(own, name).shape))
    else:
        module.num_experts = module.num_routed_experts
    module.has_gate = module.is_concatenated = True
    module.is_transposed = module.has_bias = module.has_post_expert_norm = False


def product_extension() -> ConversionExtension:
    """Return how OpenVINO is to read a product with a stack of weights."""
    return ConversionExtension(_PRODUCT, _product)


def _product(context: Any) -> list[Any]:
    ops = ov.opset13
    values, weight = context.get_input(0), context.get_input(1)
    if weight.get_element_type() != ov.Type.f32:
        weight = ops.convert(weight, "f32").output(0)
    return [ops.matmul(values, weight, False, True).output(0)]


def _row(expert: int, biases: Tensor) -> Tensor:
    return biases[expert]


def _placeholder(shape: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((), torch.nan).expand(shape), requires_grad=False)


def _placed(values: Tensor, folder: Path | None) -> Tensor:
    """Return a contiguous copy in a file without a name, which is mapped and takes no memory."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(values.numel() * values.element_size())
        mapped = torch.from_numpy(np.memmap(file, np.uint8, "r+"))
    copy = mapped.view(values.dtype).view(values.shape)
    return copy.copy_(values)
