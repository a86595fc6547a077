"""Weights that stay as a checkpoint stores them, mapped from its files.

A model is traced with placeholders that take no memory, and the trace refers to the stored
weights. Where the model itself is to compute, each weight is widened for the one product that
needs it. So neither takes more memory than the largest piece of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from openvino.frontend.pytorch import ModuleExtension
from safetensors import safe_open
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

_LAYERS = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# How many values of a weight are widened at a time.
_PIECE = 1 << 24


class StoredLayer:
    """A module whose weight is large, and that OpenVINO knows: a product or a table of vectors."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.is_table = isinstance(module, torch.nn.Embedding)
        self._is_transposed = isinstance(module, Conv1D)
        self.weight: torch.Tensor = module.weight
        self.bias: torch.Tensor | None = getattr(module, "bias", None)
        # A few families multiply what their table has by a number.
        self._scale: torch.Tensor | None = getattr(module, "embed_scale", None)

    def hide(self) -> None:
        """Put placeholders where the weights were; the stored ones stay reachable for a trace."""
        for name in ("weight", "bias"):
            stored = getattr(self, name)
            if stored is not None:
                self.module.register_parameter(f"stored_{name}", stored)
                placeholder = torch.zeros(()).expand(stored.shape)
                setattr(self.module, name, torch.nn.Parameter(placeholder, requires_grad=False))

    def keep_rows(self, count: int) -> None:
        """Have no more rows than these: as many tokens are enough for a comparison."""
        self.weight = torch.nn.Parameter(self.weight[:count], requires_grad=False)
        if self.bias is not None:
            self.bias = torch.nn.Parameter(self.bias[:count], requires_grad=False)
        self.hide()

    def extension(self) -> ModuleExtension:
        """Return how OpenVINO is to read this module."""
        name = "embedding" if self.is_table else "conv1d" if self._is_transposed else "linear"
        return ModuleExtension(
            self.module,
            f"ov_ext::{name}",
            convert=self._traced,
            # The first operand of a table is the table.
            evaluate=lambda _, *args, **__: self.shape_only(args[1 if self.is_table else 0]),
        )

    def _traced(self, _: torch.nn.Module, target: Callable[..., Any], *args: Any, **__: Any) -> Any:
        if not self.is_table:
            return target(args[0], self.weight, self.bias)
        module: Any = self.module
        options = (module.padding_idx, module.scale_grad_by_freq, module.sparse)
        rows = target(self.weight, args[0], *options)
        return rows if self._scale is None else rows * self._scale

    def shape_only(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor that has the shape of the answer, and nothing of it."""
        if self.is_table:
            return torch.full((*values.shape, self.weight.shape[1]), 0.5)
        width = self.weight.shape[1 if self._is_transposed else 0]
        return torch.full((*values.shape[:-1], width), 0.5)

    def compute(self, values: torch.Tensor) -> torch.Tensor:
        """Return what the module answers in float32."""
        if self.is_table:
            rows = functional.embedding(values, self.weight).float()
            return rows if self._scale is None else rows * self._scale
        axis = 1 if self._is_transposed else 0
        step = max(1, _PIECE // self.weight.shape[1 - axis])
        pieces = [
            values @ (piece.float() if self._is_transposed else piece.float().T)
            for piece in torch.split(self.weight, step, axis)
        ]
        product = torch.cat(pieces, dim=-1)
        return product if self.bias is None else product + self.bias.float()


class StoredWeights:
    """All large weights of a model, each as it is stored."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.layers = {m: StoredLayer(m) for m in model.modules() if _is_readable(m)}
        for layer in self.layers.values():
            layer.hide()
        for module in model.modules():
            if module not in self.layers:
                _widen(module)

    def bytes_in_float32(self, part: torch.nn.Module) -> int:
        """Return what a part's weights would take in float32; a tied one counts once."""
        weights: dict[int, int] = {}
        for module in part.modules():
            layer = self.layers.get(module)
            own = module.parameters(recurse=False) if layer is None else [layer.weight]
            weights |= {weight.data_ptr(): weight.numel() for weight in own}
        return 4 * sum(weights.values())

    @contextmanager
    def extensions(self) -> Iterator[list[ModuleExtension]]:
        """Let OpenVINO read the weights; what it leaves behind would be in the way of the next."""
        before = {module: set(vars(module)) for module in self.layers}
        try:
            yield [layer.extension() for layer in self.layers.values()]
        finally:
            for module, names in before.items():
                for name in set(vars(module)) - names:
                    delattr(module, name)

    @contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Let the model compute shapes, and read no weight."""
        with self._replaced(StoredLayer.shape_only):
            yield

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let the model compute in float32, with one weight widened at a time."""
        with self._replaced(StoredLayer.compute):
            yield

    @contextmanager
    def _replaced(self, compute: Callable[[StoredLayer, torch.Tensor], torch.Tensor]) -> Any:
        for module, layer in self.layers.items():
            module.forward = lambda values, layer=layer: compute(layer, values)
        try:
            yield
        finally:
            for module in self.layers:
                del module.forward


def _is_readable(module: torch.nn.Module) -> bool:
    """Return whether a module does just what its kind does."""
    for kind in _LAYERS:
        if isinstance(module, kind):
            is_scaled = kind is torch.nn.Embedding and hasattr(module, "embed_scale")
            return type(module).forward is kind.forward or is_scaled
    return False


def _widen(module: torch.nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()


def load(source: Path, settings: dict[str, Any]) -> Any:
    """Return a model with its parameters as they are stored, and all else in float32."""
    options = {
        "trust_remote_code": settings["trust_remote_code"],
        "attn_implementation": "sdpa",
        "local_files_only": True,
    }
    dtype = _stored_type(source)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, use_safetensors=None if settings["pickle"] else True, **options
    ).eval()
    if dtype is not torch.float32:
        _compute_buffers_again(model, source, options)
    return model.requires_grad_(False)


def _stored_type(source: Path) -> torch.dtype:
    """Return the type that all weights are stored in, float32 if there is more than one."""
    types = set()
    for path in source.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            types |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    types &= _TYPES.keys()
    return _TYPES[types.pop()] if len(types) == 1 else torch.float32


def _compute_buffers_again(model: Any, source: Path, options: dict[str, Any]) -> None:
    """Replace what the model has computed from its configuration, which was rounded with it."""
    rounded = {
        name
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and buffer.dtype is not torch.float32
    }
    stored = set(model.state_dict())
    if not rounded - stored:
        return
    config = AutoConfig.from_pretrained(
        source, trust_remote_code=options["trust_remote_code"], local_files_only=True
    )
    with _without_parameters():
        exact = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=options["trust_remote_code"]
        )
    for name, buffer in exact.named_buffers():
        if name in rounded - stored:
            model.get_buffer(name).data = buffer


@contextmanager
def _without_parameters() -> Iterator[None]:
    """Have new modules without memory for their parameters; their buffers are computed."""
    register = torch.nn.Module.register_parameter

    def register_empty(module: Any, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            empty = torch.empty_like(parameter, device="meta")
            module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)

    torch.nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
