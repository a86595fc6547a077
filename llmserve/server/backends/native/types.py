"""Triton's names of data types, and numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np

_TYPES: dict[str, Any] = {
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT8": np.uint8,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
}


def dtype_of(name: str) -> Any:
    """Return numpy's type, or say what a stand-in cannot serve."""
    if name not in _TYPES:
        raise RuntimeError(f"llmserve's stand-in serves no {name}: use NVIDIA's container")
    return _TYPES[name]
