"""What quantised checkpoints store for a weight, as a packed weight: the same whole numbers.

What has no such form, as FP8, becomes a matrix in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from llmserve.graphs import PackedWeight, packed
from llmserve.plugin import Quantised

Tensors: TypeAlias = Mapping[str, torch.Tensor]
"""What is stored of a module, by the ends of the names."""
Shape: TypeAlias = tuple[int, int]
_WORD = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ENDS = {"qweight", "weight_packed", "weight_scale", "weight_scale_inv"}
_ROWS = 512
"""How many rows are widened at a time."""
_MOST = 512.0
"""No stored number is larger: whole ones of 8 bits, less their zero point, and those of E4M3."""


class Unreadable(ValueError):
    """What is stored of a weight does not fit together, or is damaged; says what."""


@dataclass(frozen=True)
class _Groups:
    """A matrix of whole numbers that are not negative, before it is packed."""

    bits: int
    values: NDArray[np.uint8]
    """Of each output those of all inputs."""
    scales: torch.Tensor
    zeros: NDArray[np.int64] | int
    owner: NDArray[np.int64] | None = None
    """Which group each input is of, if they are not beside each other."""


def is_quantised(tensors: Tensors) -> bool:
    """Return whether what is stored of a module is a quantised weight, whole or not."""
    is_small = "weight" in tensors and tensors["weight"].dtype not in _WIDE
    return is_small or bool(_ENDS & tensors.keys())


def read_weight(found: Quantised, tensors: Tensors, shape: Shape) -> PackedWeight | torch.Tensor:
    """Return a weight of so many outputs and inputs; what is no tensor of a weight is not read."""
    if "weight" in tensors and tensors["weight"].is_floating_point():
        return _of_float8(found, tensors, shape)
    read = _int_quantized if "weight" in tensors else _READ.get(found.method)
    if read is None:
        raise Unreadable(f"is not stored as {found} is")
    return _grouped(read(found, tensors, shape), shape)


def _gptq(found: Quantised, tensors: Tensors, shape: Shape) -> _Groups:
    (rows, width), per_word = shape, _WORD // found.bits
    group = _group(found, width)
    _check_whole(shape, (per_word, per_word))
    words = _taken(tensors, "qweight", (width // per_word, rows), torch.int32)
    values = _numbers(words, found.bits).transpose(1, 0, 2).reshape(rows, width)
    scales = _taken(tensors, "scales", (width // group, rows)).T
    stored = _taken(tensors, "qzeros", (width // group, rows // per_word), torch.int32)
    zeros = _numbers(stored, found.bits).reshape(width // group, rows).T.astype(np.int64)
    # The older form has all zero points less one.
    zeros += found.form != "gptq_v2"
    return _Groups(found.bits, values, scales, zeros, _owner(tensors, "g_idx", width, group))


def _awq(found: Quantised, tensors: Tensors, shape: Shape) -> _Groups:
    (rows, width), per_word = shape, _WORD // found.bits
    group, back = _group(found, width), np.argsort(_AWQ_ORDER)
    _check_whole(shape, (per_word, 1))
    words = _taken(tensors, "qweight", (width, rows // per_word), torch.int32)
    # Eight outputs of an input are in a word, in this order.
    values = _numbers(words, found.bits)[..., back].reshape(width, rows).T
    scales = _taken(tensors, "scales", (width // group, rows)).T
    stored = _taken(tensors, "qzeros", (width // group, rows // per_word), torch.int32)
    zeros = _numbers(stored, found.bits)[..., back].reshape(-1, rows).T.astype(np.int64)
    return _Groups(found.bits, np.ascontiguousarray(values), scales, zeros)


def _pack_quantized(found: Quantised, tensors: Tensors, shape: Shape) -> _Groups:
    (rows, width), per_word = shape, _WORD // found.bits
    group = _group(found, width)
    words = _taken(tensors, "weight_packed", (rows, -(-width // per_word)), torch.int32)
    values = _numbers(words, found.bits).reshape(rows, -1)[:, :width]
    scales = _taken(tensors, "weight_scale", (rows, width // group))
    zeros: Any = 1 << found.bits - 1
    if "weight_zero_point" in tensors:
        shape = -(-rows // per_word), width // group
        stored = _taken(tensors, "weight_zero_point", shape, torch.int32)
        numbers = _numbers(stored, found.bits).transpose(0, 2, 1)
        zeros = numbers.reshape(-1, width // group)[:rows].astype(np.int64)
    owner = _owner(tensors, "weight_g_idx", width, group)
    return _Groups(found.bits, np.ascontiguousarray(values), scales, zeros, owner)


def _int_quantized(found: Quantised, tensors: Tensors, shape: Shape) -> _Groups:
    rows, width = shape
    group = _group(found, width)
    stored = _taken(tensors, "weight", shape, torch.int8)
    scale = tensors.get("weight_scale")
    if scale is not None and scale.numel() == 1:
        # One for the whole weight.
        scale = scale.reshape(1, 1).expand(rows, width // group)
        tensors = {**tensors, "weight_scale": scale}
    scales = _taken(tensors, "weight_scale", (rows, width // group))
    zeros: Any = 128
    if "weight_zero_point" in tensors:
        point = _taken(tensors, "weight_zero_point", (rows, width // group), torch.int8)
        zeros = point.numpy().astype(np.int64) + 128
    values = stored.numpy().view(np.uint8) ^ np.uint8(128)
    owner = _owner(tensors, "weight_g_idx", width, group)
    return _Groups(8, values, scales, zeros, owner)


_READ: dict[str, Callable[[Quantised, Tensors, Shape], _Groups]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _pack_quantized,
}


def _of_float8(found: Quantised, tensors: Tensors, shape: Shape) -> torch.Tensor:
    """Return a weight of 8 bits with an exponent in bfloat16, to which its product is rounded."""
    weight = _taken(tensors, "weight", shape)
    if weight.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise Unreadable(f"is of {_type(weight)} beside scales, and not of 8 bits")
    name = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
    if (scale := tensors.get(name)) is None:
        raise Unreadable("has no scales")
    rows, width = shape
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif scale.ndim == 1 and len(scale) == rows:
        scale = scale[:, None]
    height, length = (rows, width) if scale.numel() == 1 else _block(found, width)
    scale = _taken({name: scale}, name, (-(-rows // height), -(-width // length)))
    # What a block has beyond the weight is not there.
    height, length = min(height, rows), min(length, width)
    factors = _finite(scale.float())
    whole = torch.empty(shape, dtype=torch.bfloat16)
    count = max(1, _ROWS // height)
    for first in range(0, len(factors), count):
        piece = factors[first : first + count].repeat_interleave(height, 0)
        piece = piece.repeat_interleave(length, 1)[:, :width]
        part = weight[first * height : (first + count) * height].float()
        whole[first * height : (first + count) * height] = part * piece[: len(part)]
    return _all_finite(whole)


def _grouped(groups: _Groups, shape: Shape) -> PackedWeight | torch.Tensor:
    """Pack numbers, in the order of their groups if they are in another."""
    width = shape[1]
    values, zeros = groups.values, groups.zeros
    scales = np.ascontiguousarray(_finite(groups.scales.float()).numpy())
    count = scales.shape[1]
    group, order = width // count, None
    if groups.owner is not None:
        order = np.argsort(groups.owner, kind="stable").astype(np.int32)
        is_even = (np.bincount(groups.owner, minlength=count) == group).all()
    else:
        is_even = True
    if not is_even:
        return _widened(groups, scales, group)
    if order is not None:
        values = values[:, order]
    kind: Literal["u4", "u8"] = "u4" if groups.bits == 4 else "u8"
    integers = packed(values) if kind == "u4" else values
    if kind == "u8" and isinstance(zeros, int):
        signed = np.ascontiguousarray(values ^ np.uint8(zeros))
        return PackedWeight("i8", signed, group, scales, None, order)
    points: Any = zeros
    if isinstance(zeros, np.ndarray):
        same = zeros.min() == zeros.max() and zeros.max() < 256
        small = np.uint8 if zeros.max() < 256 else np.float32
        points = int(zeros.flat[0]) if same else np.ascontiguousarray(zeros.astype(small))
    return PackedWeight(kind, np.ascontiguousarray(integers), group, scales, points, order)


def _widened(groups: _Groups, scales: NDArray[np.float32], group: int) -> torch.Tensor:
    width = groups.values.shape[1]
    owner = np.arange(width) // group if groups.owner is None else groups.owner
    zeros: Any = groups.zeros
    points = zeros[:, owner] if isinstance(zeros, np.ndarray) else zeros
    points = np.asarray(points, np.float32)
    with np.errstate(over="ignore"):
        whole = torch.from_numpy((groups.values - points) * scales[:, owner]).bfloat16()
    return _all_finite(whole)


def _numbers(words: torch.Tensor, bits: int) -> NDArray[np.uint8]:
    """Return the numbers of each word of 32 bits, the lowest bits first, along a last axis."""
    plain = words.contiguous().numpy().view(np.uint32)
    shifts = np.arange(0, _WORD, bits, dtype=np.uint32)
    numbers = plain[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return numbers.astype(np.uint8)


def _block(found: Quantised, width: int) -> Shape:
    return found.block if all(found.block) else (1, width)


def _check_whole(shape: Shape, sizes: Shape) -> None:
    if shape[0] % sizes[0] or shape[1] % sizes[1]:
        raise Unreadable(f"is {_words(shape)}, which is no whole number of words")


def _group(found: Quantised, width: int) -> int:
    group = found.group or width
    if width % group:
        raise Unreadable(f"has {width} inputs, which groups of {group} do not divide")
    return group


def _owner(tensors: Tensors, name: str, width: int, group: int) -> NDArray[np.int64] | None:
    """Return the group of each input; None if they are in order."""
    if name not in tensors:
        return None
    stored = _taken(tensors, name, (width,))
    if stored.dtype not in (torch.int32, torch.int64):
        raise Unreadable(f"has a {name} of {_type(stored)}, and not of int32")
    owner = stored.numpy().astype(np.int64)
    if (owner < 0).any() or (owner >= width // group).any():
        raise Unreadable(f"has a {name} that names groups which it does not have")
    return None if np.array_equal(owner, np.arange(width) // group) else owner


def _taken(
    tensors: Tensors, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a tensor of a shape and a type."""
    found = tensors.get(name)
    if found is None:
        raise Unreadable(f"has no {name}")
    if tuple(found.shape) != shape:
        raise Unreadable(f"has a {name} of {_words(found.shape)}, and not of {_words(shape)}")
    if dtype is not None and found.dtype != dtype:
        raise Unreadable(f"has a {name} of {_type(found)}, and not of {str(dtype)[6:]}")
    return found


def _all_finite(weight: torch.Tensor) -> torch.Tensor:
    if not weight.isfinite().all():
        raise Unreadable("has values that are no finite numbers")
    return weight


def _finite(scales: torch.Tensor) -> torch.Tensor:
    """Refuse scales that are no numbers, or make none of what they are multiplied with."""
    if not (scales * _MOST).isfinite().all():
        raise Unreadable("has scales that are no numbers")
    return scales


def _words(shape: Any) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
