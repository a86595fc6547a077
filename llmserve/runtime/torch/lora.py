"""Adds adapters to the products of a torch model: those of all rows of a pass at the same time.

The first matrices of all loaded adapters stand side by side, and so do the second ones. A row gets
what its own adapter adds because the columns of the others are zeros between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmserve.runtime.lora import Lora, LoraError

_REFUSED = ("lm_head", "experts")
"""Modules that do not get each token of a pass once."""


class LoraProducts:
    """Implements :class:`~llmserve.runtime.engine.adapters.AdapterHome` for a torch model."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: dict[str, Any] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        }
        self._weights: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
        self._loras: dict[str, Lora] = {}
        self._stacks: dict[str, tuple[Tensor, Tensor]] = {}
        self._hooks: dict[str, Any] = {}
        self._columns: dict[str, slice] = {}
        self._used: slice | None = None
        """The columns that the rows of a pass use, if any of them has an adapter."""
        self._others: Tensor | None = None
        """Where a row's columns are not its own, if the rows of a pass have several adapters."""

    def fits(self, lora: Lora) -> None:
        for name, shape in lora.shapes.items():
            if any(part in _REFUSED for part in name.split(".")):
                raise LoraError(f"adds to {name}, which is not supported")
            if (module := self._modules.get(name)) is None:
                raise LoraError(f"adds to {name}, which is no product of this model")
            if shape != (own := _shape(module)):
                raise LoraError(
                    f"has {shape} for {name}, which has {own} here: is it of this model?"
                )

    def size(self, lora: Lora) -> int:
        # Its own weights, and their place beside those of others.
        widths = {name: int(self._modules[name].weight.itemsize) for name in lora.shapes}
        each = (widths[name] * sum(shape) for name, shape in lora.shapes.items())
        return 2 * lora.rank * sum(each)

    def load(self, key: str, lora: Lora) -> None:
        from safetensors import SafetensorError, safe_open

        weights = {}
        try:
            with safe_open(lora.file, "pt") as stored:
                for name, (inputs, outputs) in lora.shapes.items():
                    own = self._modules[name].weight
                    pair = []
                    for kind, shape in (("A", (lora.rank, inputs)), ("B", (outputs, lora.rank))):
                        part = stored.get_tensor(f"base_model.model.{name}.lora_{kind}.weight")
                        if part.shape != shape:
                            raise LoraError("was changed while it was read")
                        part = part.to(own.dtype) if part.is_floating_point() else part
                        scaled = part * lora.scale if kind == "B" else part
                        if part.dtype != own.dtype or not scaled.isfinite().all():
                            raise LoraError(f"has weights of {name} that are no numbers")
                        pair.append(part.to(own.device))
                    weights[name] = pair[0], pair[1]
        except (OSError, SafetensorError):
            raise LoraError("has files that cannot be read") from None
        self._weights[key], self._loras[key] = weights, lora
        self._stack()

    def unload(self, key: str) -> None:
        del self._weights[key], self._loras[key]
        self._stack()

    def _stack(self) -> None:
        """Put the matrices of all loaded adapters side by side; a scale is in the second ones."""
        stops, stop = {}, 0
        for key, lora in self._loras.items():
            stops[key] = slice(stop, stop + lora.rank)
            stop += lora.rank
        self._columns = stops
        wanted = {name for weights in self._weights.values() for name in weights}
        for name in self._hooks.keys() - wanted:
            self._hooks.pop(name).remove()
            del self._stacks[name]
        for name in wanted:
            weight = self._modules[name].weight
            inputs, outputs = _shape(self._modules[name])
            first = torch.zeros(stop, inputs, dtype=weight.dtype, device=weight.device)
            second = torch.zeros(stop, outputs, dtype=weight.dtype, device=weight.device)
            for key, columns in stops.items():
                if pair := self._weights[key].get(name):
                    first[columns], second[columns] = pair[0], pair[1].T * self._loras[key].scale
            self._stacks[name] = first, second
            if name not in self._hooks:
                self._hooks[name] = self._modules[name].register_forward_hook(self._adding(name))

    def _adding(self, name: str) -> Any:
        def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if self._used is None:
                return None
            first, second = (part[self._used] for part in self._stacks[name])
            own = functional.linear(inputs[0], first)
            if self._others is not None:
                # What others' columns have may be no number: it is replaced, and not multiplied
                # by 0.
                own = own.masked_fill_(self._others, 0)
            rows = output.reshape(-1, output.shape[-1])
            return torch.addmm(rows, own.reshape(-1, own.shape[-1]), second).view(output.shape)

        return add

    @contextmanager
    def of_rows(self, keys: Sequence[str], shape: tuple[int, ...]) -> Iterator[None]:
        """Add to each row what its adapter adds, none for an empty key.

        The rows have the shape of a pass without its last axis.
        """
        if not any(keys):
            yield
            return
        if len({*keys}) == 1:
            self._used = self._columns[keys[0]]
        else:
            total = max(columns.stop for columns in self._columns.values())
            others = torch.ones(len(keys), total, dtype=torch.bool)
            for row, key in enumerate(keys):
                if key:
                    others[row, self._columns[key]] = False
            weight = next(iter(self._stacks.values()))[0]
            self._used = slice(0, total)
            self._others = others.to(weight.device).view(*shape, total)
        try:
            yield
        finally:
            self._used = self._others = None


def lora_products(location: str, options: Mapping[str, Any]) -> LoraProducts:
    """Return the products of a model that has shapes and no weights, to check adapters with."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(location, **options)
        trusted = {"trust_remote_code": True} if options.get("trust_remote_code") else {}
        return LoraProducts(AutoModelForCausalLM.from_config(config, **trusted))


def _shape(module: Any) -> tuple[int, int]:
    """Return how many inputs and outputs a product has."""
    rows, columns = module.weight.shape
    return (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)
