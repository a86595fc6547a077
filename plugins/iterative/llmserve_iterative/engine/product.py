"""Linear layers in bfloat16 whose product is our own, for processors without tiles.

oneDNN takes about 15 µs to begin a product and reads a weight at two thirds of the speed that
the memory has; with few rows that is most of a step. A processor with matrix tiles (AMX) is
faster with oneDNN as soon as there are more rows.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

from llmserve_iterative.engine.memory import zeros
from llmserve_iterative.engine.native import load_library, processor_has
from llmserve_iterative.engine.noting import invoke

_PANEL = 16


class Product:
    """The kernels that pack a weight and multiply with it."""

    def __init__(self, library: Any) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.pack, self.multiply = library.pack, library.multiply
        self.pack.argtypes = [pointer, number, number, pointer]
        self.multiply.argtypes = [pointer, number, number, pointer, pointer, pointer, number]
        self.pack.restype = self.multiply.restype = None


def make_product(dtype: torch.dtype, device: torch.device) -> Product | None:
    """Return the kernels if this processor has use for them."""
    if dtype != torch.bfloat16 or device.type != "cpu" or processor_has("amx_bf16"):
        return None
    library = load_library()
    return Product(library) if library is not None and library.can_multiply() else None


class ProductLinear(nn.Module):
    """A linear layer over a weight in panels; the number of inputs is even."""

    def __init__(self, product: Product, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        # The name stays for model code that asks for the weight's type or device.
        self.weight = weight.new_empty(0)
        self.bias = bias
        self._multiply = product.multiply
        self._outputs, self._inputs = weight.shape
        size = -(-self._outputs // _PANEL) * _PANEL * self._inputs
        self._panels = zeros(size, dtype=weight.dtype, device=weight.device)
        whole = weight.contiguous()
        product.pack(whole.data_ptr(), *whole.shape, self._panels.data_ptr())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias``."""
        rows = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self._outputs)
        invoke(
            self._multiply,
            *(rows, rows.numel() // self._inputs, self._inputs),
            *(self._panels, self.bias, out, self._outputs),
        )
        return out
