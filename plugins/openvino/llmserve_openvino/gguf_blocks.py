"""The blocks of GGUF files as packed weights: the same whole numbers, in OpenVINO's order.

Where a block has a smallest value instead of a zero point, the zero point is a fraction. Beside
numbers of 4 bits it stays one: rounded, the products would be faster, and the answers much worse
(measured: see the page of the plugin). Numbers of 5 bits are in bytes, which have space for finer
steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.graphs import PackedWeight, packed

Blocks = NDArray[np.uint8]
"""The blocks of some rows: rows, blocks of a row, bytes of a block."""
Values = NDArray[Any]
"""Whole numbers: rows, groups of a row, numbers of a group."""
_FLATTEST = 60_000
_GROUP = 32
_HIGHEST_U4, _HIGHEST_U8 = 15, 255


class NoNumbers(ValueError):
    """A block has a scale that is no number, or one beyond what a model could have."""


def packed_rows(kind: str, blocks: Blocks) -> PackedWeight:
    """Return rows of blocks of one of the types in ``READ`` as a packed weight."""
    # What is no number is refused by its result.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        return READ[kind](blocks)


def _q4_0(blocks: Blocks) -> PackedWeight:
    values = _halves(blocks[..., 2:18])
    return PackedWeight("u4", _rows(packed(values)), 32, _checked(_float(blocks, 0)), 8)


def _q4_1(blocks: Blocks) -> PackedWeight:
    return _with_zeros(_halves(blocks[..., 4:20]), 15, _float(blocks, 0), -_float(blocks, 2))


def _q5_0(blocks: Blocks) -> PackedWeight:
    values = _halves(blocks[..., 6:22]) | _fifth_bits(blocks[..., 2:6])
    return PackedWeight("i8", _rows(values - np.uint8(16)), 32, _checked(_float(blocks, 0)))


def _q5_1(blocks: Blocks) -> PackedWeight:
    values = _halves(blocks[..., 8:24]) | _fifth_bits(blocks[..., 4:8])
    return _with_zeros(values, 31, _float(blocks, 0), -_float(blocks, 2))


def _q8_0(blocks: Blocks) -> PackedWeight:
    return PackedWeight("i8", _rows(blocks[..., 2:34]), 32, _checked(_float(blocks, 0)))


def _q4_k(blocks: Blocks) -> PackedWeight:
    scales, least = _k_scales(blocks)
    return _with_zeros(_by_group(_k_halves(blocks[..., 16:144])), 15, scales, least)


def _q5_k(blocks: Blocks) -> PackedWeight:
    scales, least = _k_scales(blocks)
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values = _k_halves(blocks[..., 48:176]) | high << 4
    return _with_zeros(_by_group(values), 31, scales, least)


def _q6_k(blocks: Blocks) -> PackedWeight:
    shape = blocks.shape[:-1]
    low = blocks[..., :128].reshape(*shape, 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 15
    shifts = np.array([[0], [2], [4], [6]], np.uint8)
    high = blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> shifts & 3
    values = low.reshape(*shape, 2, 4, 32) | high << 4
    integers = (values - np.uint8(32)).reshape(*shape, 256)
    factors = blocks[..., 192:208].view(np.int8).astype(np.float32)
    scales = _float(blocks, 208)[..., None] * factors
    return PackedWeight("i8", _rows(integers), 16, _checked(_rows(scales)))


READ: dict[str, Callable[[Blocks], PackedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _with_zeros(
    values: Values, highest: int, scales: NDArray[np.float32], least: NDArray[np.float32]
) -> PackedWeight:
    """Return what is ``value * scale - least`` with zero points, one for each group."""
    _checked(least)
    _checked(scales)
    # What is all but the same number is below a zero point of one.
    is_flat = np.abs(least) >= _FLATTEST * np.abs(scales)
    values = np.where(is_flat[..., None], np.uint8(0), values)
    zeros = np.where(is_flat, np.float32(1), least / np.where(is_flat, np.float32(1), scales))
    scales = np.where(is_flat, least, scales)
    if highest > _HIGHEST_U4:
        return _in_eighths(values, scales, zeros)
    integers = _rows(packed(values))
    return PackedWeight("u4", integers, _GROUP, _checked(scales), _checked(zeros))


def _in_eighths(values: Values, scales: Any, zeros: Any) -> PackedWeight:
    """Return numbers of 5 bits in steps of an eighth: so a whole zero point is near enough."""
    values, zeros, scales = values * np.uint8(8), np.rint(zeros * 8), scales / 8
    outside = (zeros < 0) | (zeros > _HIGHEST_U8)
    if outside.any():
        # They are all on one side of zero, and get steps of their own.
        few = (values[outside] - zeros[outside][:, None]) * scales[outside][:, None]
        low, high = np.minimum(few.min(-1), 0), np.maximum(few.max(-1), 0)
        step = np.maximum((high - low) / _HIGHEST_U8, np.finfo(np.float32).tiny)
        scales[outside], zeros[outside] = step, np.rint(-low / step)
        again = np.rint(few / step[:, None]) + zeros[outside][:, None]
        values[outside] = again.clip(0, _HIGHEST_U8)
    return PackedWeight("u8", _rows(values), _GROUP, _checked(scales), zeros.astype(np.uint8))


def _rows(array: Any) -> Any:
    return np.ascontiguousarray(array.reshape(len(array), -1))


def _by_group(values: Values) -> Values:
    return values.reshape(len(values), -1, values.shape[-1])


def _float(blocks: Blocks, first: int) -> NDArray[np.float32]:
    """Return a float16 of each block."""
    two = np.ascontiguousarray(blocks[..., first : first + 2])
    return two.view("<f2")[..., 0].astype(np.float32)


def _checked(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    if not np.isfinite(numbers).all():
        raise NoNumbers("has blocks with scales that are no numbers")
    return numbers.astype(np.float32)


def _halves(values: Values) -> Values:
    """Return the lower halves of all bytes, and then the upper ones."""
    return np.concatenate([values & 15, values >> 4], axis=-1)


def _fifth_bits(values: Values) -> Values:
    """Return the fifth bits of 32 numbers, which are apart from the others, in their place."""
    bits: Values = np.unpackbits(np.ascontiguousarray(values), axis=-1, bitorder="little") << 4
    return bits


def _k_halves(values: Values) -> Values:
    """Return the numbers of 4 bits of the larger blocks: eight groups, two in the same 32 bytes."""
    pairs = values.reshape(*values.shape[:-1], 4, 1, 32) >> np.array([[0], [4]], np.uint8) & 15
    return pairs.reshape(*values.shape[:-1], 8, 32)


def _k_scales(blocks: Blocks) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the scale and the smallest value of each group, which are of 6 bits in a block."""
    first, second, third = (blocks[..., start : start + 4] for start in (4, 8, 12))
    factors = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    least = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    return (
        _rows(_float(blocks, 0)[..., None] * factors.astype(np.float32)),
        _rows(_float(blocks, 2)[..., None] * least.astype(np.float32)),
    )
