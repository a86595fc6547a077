"""What the kernels in C do, for tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from llmserve_iterative.engine.native import load_library
from llmserve_iterative.engine.noting import invoke

_TYPES = (torch.float32, torch.bfloat16)


def make_kernels(dtype: torch.dtype, device: torch.device, places: int) -> Kernels | None:
    """Return kernels for a cache of that type and size, where there are any."""
    if device.type != "cpu" or dtype not in _TYPES:
        return None
    library = load_library()
    return None if library is None else Kernels(library, dtype, places)


class Kernels:
    """Attention of single tokens, and writing to the cache."""

    def __init__(self, library: Any, dtype: torch.dtype, places: int) -> None:
        self._places = places
        self._half = int(dtype == torch.bfloat16)
        self._width = dtype.itemsize
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._attend = library.attend
        self._attend.argtypes = [
            *(pointer, number, number, pointer, pointer, pointer, pointer),
            *(number, number, number, number, number, number, real, real, ctypes.c_int),
        ]
        self._keep = library.keep
        self._keep.argtypes = [*(pointer, number, number, pointer, pointer), *(number,) * 4]
        self._attend.restype = self._keep.restype = None

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        window: int | None,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Return ``[tokens, all heads, width]`` for queries ``[all heads, tokens, width]``.

        Each token sees its sequence up to itself. They are the first ones of the table.
        """
        if query.stride(2) != 1:
            query = query.contiguous()
        all_heads, tokens, width = query.shape
        heads = len(keys) // self._places
        out = query.new_empty(tokens, all_heads, width)
        invoke(
            self._attend,
            *(query, query.stride(1), query.stride(0)),
            *(keys, values, out),
            *(table, table.shape[1]),
            *(tokens, heads, all_heads // heads, width),
            *(window or 0, scale, softcap or 0.0, self._half),
        )
        return out

    def keep(self, rows: torch.Tensor, layer: torch.Tensor, table: torch.Tensor) -> None:
        """Write rows ``[heads, tokens, width]`` to the places of their tokens."""
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        heads, tokens, width = rows.shape
        size = self._width
        invoke(
            self._keep,
            *(rows, rows.stride(1) * size, rows.stride(0) * size),
            *(layer, table, table.shape[1]),
            *(tokens, heads, width * size),
        )
