"""Quantised checkpoints made by hand, from the public definitions of their formats.

Each writer rounds the products of a model, writes what the format stores of them, and returns the
weights that this stands for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Written = tuple[dict[str, Any], torch.Tensor]
"""What is stored of a weight, by the ends of the names, and the weight that it stands for."""
Write = Callable[[Any], Written]


def write_quantised(
    folder: Path, described: dict[str, Any], write: Write, skip: tuple[str, ...] = ("lm_head",)
) -> dict[str, torch.Tensor]:
    """Quantise the products of a saved model where it is; return all its weights as they are."""
    file = folder / "model.safetensors"
    stored, expected = load_file(file), {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        is_product = module.endswith(("_proj", "lm_head")) and module.rpartition(".")[2] not in skip
        if not (is_product and name.endswith(".weight")):
            tensors[name], expected[name] = tensor, tensor
            continue
        written, expected[name] = write(tensor.float().numpy())
        for end, value in written.items():
            array = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
            tensors[f"{module}.{end}"] = array.contiguous()
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    return expected


def gptq(group: int, bits: int = 4, owner: Any = None, form: str = "gptq") -> Write:
    """Eight or four numbers of an input's column in a word; zero points less one."""

    def write(weight: Any) -> Written:
        width = weight.shape[1]
        of = np.arange(width) // group if owner is None else owner(width)
        values, scales, zeros = _rounded(weight, of, bits)
        expected = (values - zeros[:, of]) * scales[:, of]
        stored = {
            "qweight": _words(values.T, bits, axis=0),
            "qzeros": _words((zeros - (form == "gptq")).T, bits, axis=1),
            "scales": scales.T.astype(np.float16),
            "g_idx": of.astype(np.int32),
        }
        return stored, torch.from_numpy(expected.astype(np.float32))

    return write


def awq(group: int) -> Write:
    """Eight outputs in a word, of which the second is the third: 0 2 4 6 1 3 5 7."""

    def write(weight: Any) -> Written:
        width = weight.shape[1]
        of = np.arange(width) // group
        values, scales, zeros = _rounded(weight, of, 4)
        expected = (values - zeros[:, of]) * scales[:, of]

        def in_order(numbers: Any) -> Any:
            eights = numbers.reshape(len(numbers), -1, 8)
            return eights[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(numbers.shape)

        stored = {
            "qweight": _words(in_order(values.T), 4, axis=1),
            "qzeros": _words(in_order(zeros.T), 4, axis=1),
            "scales": scales.T.astype(np.float16),
        }
        return stored, torch.from_numpy(expected.astype(np.float32))

    return write


def pack_quantized(
    group: int, bits: int = 4, *, symmetric: bool = True, owner: Any = None
) -> Write:
    """The inputs of an output in words, from the smallest number up; scales in bfloat16."""

    def write(weight: Any) -> Written:
        rows, width = weight.shape
        of = np.arange(width) // (group or width) if owner is None else owner(width)
        values, scales, zeros = _rounded(weight, of, bits, torch.bfloat16)
        if symmetric:
            zeros = np.full_like(zeros, 1 << bits - 1)
        expected = (values - zeros[:, of]) * scales[:, of]
        stored = {
            "weight_packed": _words(values, bits, axis=1),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
            "weight_shape": torch.tensor([rows, width]),
        }
        if not symmetric:
            stored["weight_zero_point"] = _words(zeros, bits, axis=0)
        if owner is not None:
            stored["weight_g_idx"] = of.astype(np.int32)
        return stored, torch.from_numpy(expected.astype(np.float32))

    return write


def int_quantized(weight: Any) -> Written:
    """Numbers of 8 bits with a sign, a scale for each output."""
    scales = torch.from_numpy(np.abs(weight).max(1, keepdims=True) / 127).bfloat16()
    values = np.rint(weight / scales.float().numpy()).clip(-128, 127).astype(np.int8)
    expected = torch.from_numpy(values.astype(np.float32)) * scales.float()
    return {"weight": values, "weight_scale": scales}, expected


def float8(height: int, length: int, name: str = "weight_scale_inv") -> Write:
    """Numbers of 8 bits with an exponent, a scale for each block."""

    def write(weight: Any) -> Written:
        rows, width = weight.shape
        high, wide = -(-rows // (height or rows)), -(-width // (length or width))
        scales = np.zeros((high, wide), np.float32)
        owner = np.arange(rows) // (height or rows), np.arange(width) // (length or width)
        np.maximum.at(scales, np.ix_(*owner), np.abs(weight) / 448)
        spread = torch.from_numpy(scales[np.ix_(*owner)])
        values = (torch.from_numpy(weight) / spread).to(torch.float8_e4m3fn)
        expected = (values.float() * spread).bfloat16().float()
        return {"weight": values, name: scales}, expected

    return write


def _rounded(weight: Any, owner: Any, bits: int, kind: torch.dtype = torch.float16) -> Any:
    """Return whole numbers, and the scale and the zero point of each group."""
    rows, highest = len(weight), (1 << bits) - 1
    count = owner.max() + 1
    scales = np.zeros((rows, count), np.float32)
    zeros = np.zeros((rows, count), np.int64)
    values = np.zeros(weight.shape, np.int64)
    for group in range(count):
        mine = weight[:, owner == group]
        low, high = np.minimum(mine.min(1), -1e-3), np.maximum(mine.max(1), 1e-3)
        scale = torch.from_numpy((high - low) / highest).to(kind).float().numpy()
        # A zero point of one at least: one less than that is stored.
        zero = np.rint(-low / scale).clip(1, highest).astype(np.int64)
        numbers = np.rint(mine / scale[:, None]) + zero[:, None]
        values[:, owner == group] = numbers.clip(0, highest)
        scales[:, group], zeros[:, group] = scale, zero
    return values, scales, zeros


def _words(numbers: Any, bits: int, axis: int) -> Any:
    """Return numbers in words of 32 bits, the first in the lowest bits."""
    count, each = numbers.shape[axis], 32 // bits
    words = []
    for first in range(0, count, each):
        word = 0
        for place, index in enumerate(range(first, min(first + each, count))):
            word = word | np.take(numbers, index, axis).astype(np.int64) << bits * place
        words.append(word)
    return np.stack(words, axis).astype(np.uint32).view(np.int32)
