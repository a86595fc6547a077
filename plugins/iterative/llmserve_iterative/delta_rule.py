"""A step of the gated delta rule on a CPU, which changes its states where they are.

transformers writes a whole state anew five times for each token. With several sequences that is
more memory than the weights are. Here it is read once, for keys and queries together, and changed
once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_NAME = "torch_recurrent_gated_delta_rule"
"""What models of all families call it."""
_EPSILON = 1e-6

Step = Callable[..., tuple[Tensor, Tensor | None]]


def modules_with_steps(model: torch.nn.Module) -> list[ModuleType]:
    """Return where a model's layers find the function of a step."""
    if next(model.parameters()).device.type != "cpu":
        return []
    modules = {sys.modules[type(each).__module__] for each in model.modules()}
    return [each for each in modules if _NAME in vars(each)]


@contextmanager
def stepping_in_place(modules: list[ModuleType]) -> Iterator[None]:
    """Have layers of these modules take their steps here."""
    own = [vars(module)[_NAME] for module in modules]
    for module, function in zip(modules, own, strict=True):
        setattr(module, _NAME, partial(_step, function))
    try:
        yield
    finally:
        for module, function in zip(modules, own, strict=True):
            setattr(module, _NAME, function)


def _step(
    own: Step, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor,
    initial_state: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False, **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    state = initial_state
    if state is None or state.dtype != torch.float32 or value.shape[1] != 1:
        return own(
            query, key, value, g=g, beta=beta, initial_state=initial_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **others,
        )  # fmt: skip
    heads = value.shape[2]
    # [sequences, heads, key or query, width]
    pair = torch.stack([key[:, 0], query[:, 0]], dim=2).float()
    pair = pair.repeat_interleave(heads // pair.shape[1], dim=1)
    if use_qk_l2norm_in_kernel:
        pair = pair * torch.rsqrt((pair * pair).sum(dim=-1, keepdim=True) + _EPSILON)
    decay = g[:, 0].float().exp()[..., None]
    found = (pair @ state) * decay[..., None]
    keys, queries = pair[:, :, 0], pair[:, :, 1] * pair.shape[-1] ** -0.5
    change = (value[:, 0].float() - found[:, :, 0]) * beta[:, 0].float()[..., None]
    state.mul_(decay[..., None]).addcmul_(keys[..., None], change[:, :, None])
    output = found[:, :, 1] * pair.shape[-1] ** -0.5
    output = output + (queries * keys).sum(dim=-1, keepdim=True) * change
    return output[:, None].to(query.dtype), state
