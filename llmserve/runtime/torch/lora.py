"""Adds adapters to the products of a torch model: those of all rows of a pass at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmserve.runtime.lora import Lora
from llmserve.runtime.lora_weights import LoraColumns, ProductShapes, check_lora, read_lora_weights


class LoraProducts:
    """Implements :class:`~llmserve.runtime.engine.adapters.AdapterHome` for a torch model."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = _products(model)
        self.shapes: ProductShapes = {name: _shape(each) for name, each in self._modules.items()}
        self._weights: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
        self._ranks: dict[str, int] = {}
        self._stacks: dict[str, tuple[Tensor, Tensor]] = {}
        self._hooks: dict[str, Any] = {}
        # Several that come before one pass are put side by side once, not once each: what each
        # time would free stays with the process.
        self._is_stacked = True
        self._columns = LoraColumns({})
        self._used: slice | None = None
        """The columns that the rows of a pass use, if any of them has an adapter."""
        self._others: Tensor | None = None
        """Where a row's columns are not its own, if the rows of a pass have several adapters."""

    def fits(self, lora: Lora) -> None:
        check_lora(lora, self.shapes)

    def size(self, lora: Lora) -> int:
        # Its own weights, and their place beside those of others.
        widths = {name: int(self._modules[name].weight.itemsize) for name in lora.shapes}
        each = (widths[name] * sum(shape) for name, shape in lora.shapes.items())
        return 2 * lora.rank * sum(each)

    def load(self, key: str, lora: Lora) -> None:
        types = {self._modules[name].weight.dtype for name in lora.shapes}
        weights = {}
        for name, *pair in read_lora_weights(lora, min(torch.finfo(dtype).max for dtype in types)):
            own = self._modules[name].weight
            first, second = (torch.from_numpy(part).to(own.device, own.dtype) for part in pair)
            weights[name] = first, second
        self._weights[key], self._ranks[key] = weights, lora.rank
        self._is_stacked = False

    def unload(self, key: str) -> None:
        del self._weights[key], self._ranks[key]
        self._is_stacked = False

    def _stack(self) -> None:
        """Put the matrices of all loaded adapters side by side."""
        self._columns = LoraColumns(self._ranks)
        wanted = {name for weights in self._weights.values() for name in weights}
        for name in self._hooks.keys() - wanted:
            self._hooks.pop(name).remove()
            del self._stacks[name]
        for name in wanted:
            weight = self._modules[name].weight
            first, second = (
                torch.zeros(self._columns.count, size, dtype=weight.dtype, device=weight.device)
                for size in self.shapes[name]
            )
            for key, weights in self._weights.items():
                if pair := weights.get(name):
                    first[self._columns[key]], second[self._columns[key]] = pair
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
        if not self._is_stacked:
            self._stack()
            self._is_stacked = True
        self._used, own = self._columns.of_rows(keys)
        if len({*keys}) > 1:
            device = next(iter(self._stacks.values()))[0].device
            self._others = torch.from_numpy(~own).to(device).view(*shape, -1)
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


def _products(model: nn.Module) -> dict[str, Any]:
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        # What makes embeddings of images and sounds is no part of a pass over rows.
        and not name.startswith("model.embed_tokens_extend.")
    }


def _shape(module: Any) -> tuple[int, int]:
    """Return how many inputs and outputs a product has."""
    rows, columns = module.weight.shape
    return (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)
