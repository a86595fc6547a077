"""Weights of 4 and 8 bits in groups: what they are, and the form in which OpenVINO computes them.

A checkpoint that is stored in few bits, or a weight that a build rounds, becomes a
:class:`PackedWeight`. OpenVINO's products for a CPU read it as it is, if the constants are in the
one form that they know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.graphs.library import openvino as ov

Kind: TypeAlias = Literal["u4", "u8", "i8"]
Rows: TypeAlias = slice | NDArray[np.integer[Any]]
Place: TypeAlias = Callable[[NDArray[Any], Any, Any], Any]
"""Makes a constant of an array's bytes, a type of OpenVINO's and a shape."""
_TYPES = {"u4": ov.Type.u4, "u8": ov.Type.u8, "i8": ov.Type.i8}
_HIGHEST_U4 = 15


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix of small whole numbers, of which each group along a row has a scale.

    A weight is ``(integer - zero) * scale``. The arrays are in C's order, and may
    be mapped from a file.
    """

    kind: Kind
    integers: NDArray[np.uint8]
    """The bytes of each row; of 4 bits, the first of a pair is in the lower half of a byte."""
    group: int
    """How many numbers of a row share a scale."""
    scales: NDArray[np.float32]
    """One for each group of each row."""
    zeros: int | NDArray[np.uint8] | NDArray[np.float32] | None = None
    """None, one for all, or one for each group: with float32, nothing is computed in 8 bits."""
    order: NDArray[np.int32] | None = None
    """Which input each number of a row is for; None if they are in the inputs' order."""

    def __post_init__(self) -> None:
        groups = (self.shape[0], self.shape[1] // self.group)
        if self.shape[1] % self.group or self.scales.shape != groups:
            raise ValueError(f"{self.scales.shape} scales for {self.shape} in {self.group}")
        if self.scales.dtype != np.float32:
            raise ValueError(f"scales in {self.scales.dtype}: they are in float32")
        if isinstance(self.zeros, np.ndarray) and self.zeros.shape != groups:
            raise ValueError(f"{self.zeros.shape} zero points for {groups} groups")

    @property
    def shape(self) -> tuple[int, int]:
        """Return how many rows, which are the outputs of a product, and how long each is."""
        rows, width = self.integers.shape
        return rows, 2 * width if self.kind == "u4" else width

    def part(self, rows: Rows) -> PackedWeight:
        """Return some of the rows, as a view if they are a slice."""
        zeros: Any = self.zeros[rows] if isinstance(self.zeros, np.ndarray) else self.zeros
        integers, scales = self.integers[rows], self.scales[rows]
        return replace(self, integers=integers, scales=scales, zeros=zeros)

    def dequantised(self, rows: Rows = slice(None)) -> NDArray[np.float32]:
        """Return some of the rows in float32."""
        part = self.part(rows)
        count, width = part.shape
        grouped = part.values().reshape(count, width // self.group, self.group)
        values = grouped.astype(np.float32)
        if isinstance(part.zeros, np.ndarray):
            values -= part.zeros[..., None]
        elif part.zeros is not None:
            values -= part.zeros
        values *= part.scales[..., None]
        rows_of_values = values.reshape(count, width)
        if self.order is None:
            return rows_of_values
        ordered = np.empty_like(rows_of_values)
        ordered[:, self.order] = rows_of_values
        return ordered

    def values(self) -> NDArray[Any]:
        """Return the whole numbers, one in each byte."""
        if self.kind == "u4":
            return unpacked(self.integers)
        return self.integers.view(np.int8) if self.kind == "i8" else self.integers

    def in_bytes(self) -> PackedWeight:
        """Return the same weights with a byte for each."""
        return replace(self, kind="u8", integers=self.values()) if self.kind == "u4" else self


def packed(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return rows of numbers of 4 bits as two in a byte, the first in the lower half."""
    first, second = values[..., ::2], np.left_shift(values[..., 1::2], np.uint8(4))
    return np.bitwise_or(first, second, dtype=np.uint8)


def unpacked(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return numbers of 4 bits with a byte for each: the reverse of :func:`packed`."""
    halves = np.empty((*values.shape, 2), np.uint8)
    np.bitwise_and(values, _HIGHEST_U4, out=halves[..., 0])
    np.right_shift(values, 4, out=halves[..., 1])
    return halves.reshape(*values.shape[:-1], -1)


def shared(data: NDArray[Any], kind: Any, shape: Any) -> Any:
    """Return a constant that refers to an array, which has to be kept for as long: a ``Place``."""
    return ov.op.Constant(ov.Tensor(data, ov.Shape(shape), kind), True)


def product_weight(
    weight: PackedWeight, place: Place = shared, rows: Sequence[int] | None = None
) -> Any:
    """Return a weight's value in float32, in the form that OpenVINO's products read packed.

    It is for a product that has each row of the weight as an output (``transpose_b``), and whose
    inputs are those of :func:`ordered_inputs`. ``rows`` are those of each matrix of a stack, where
    it is one.

    Scales are in float32, as OpenVINO computes them: it would keep those of 16 bits a second time,
    widened, beside the form that the processor reads (2026.4.1: of a Q4_K_M model, a third more).
    """
    ops = ov.opset13
    rows = [weight.shape[0]] if rows is None else list(rows)
    width = weight.shape[1]
    count = width // weight.group
    # A scale for a whole row is that of int8, which is faster without groups.
    groups = [*rows, count] if count > 1 else rows
    kind = _TYPES[weight.kind]
    value = ops.convert(place(weight.integers, kind, [*groups, weight.group]), "f32")
    if weight.zeros is not None:
        value = ops.subtract(value, _zeros(weight, [*groups, 1], place))
    value = ops.multiply(value, place(weight.scales, ov.Type.f32, [*groups, 1]))
    if count > 1:
        value = ops.reshape(value, np.array([*rows, width]), False)
    return value.output(0)


def ordered_inputs(weight: PackedWeight, inputs: Any) -> Any:
    """Return the inputs of a product in the order of a weight's numbers."""
    if weight.order is None:
        return inputs
    ops = ov.opset13
    return ops.gather(inputs, ops.constant(weight.order), ops.constant(np.int32(-1))).output(0)


def table_weight(weight: PackedWeight, place: Place = shared) -> Any:
    """Return a weight's value in float32 in the form of which OpenVINO gathers single rows."""
    if weight.order is not None:
        raise ValueError("a table of vectors has its numbers in order")
    if weight.kind == "u4":
        # OpenVINO 2026.4.1 ends the process.
        raise ValueError("a table of vectors has a byte for each number")
    return product_weight(weight, place)


def _zeros(weight: PackedWeight, shape: Any, place: Place) -> Any:
    ops, zeros = ov.opset13, weight.zeros
    if not isinstance(zeros, np.ndarray):
        return ops.convert(ops.constant(np.array(zeros, np.uint8)), "f32")
    if zeros.dtype == np.float32:
        return place(zeros, ov.Type.f32, shape)
    return ops.convert(place(zeros, ov.Type.u8, shape), "f32")
