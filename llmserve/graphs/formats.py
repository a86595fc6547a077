"""Writes a converted model with its weights in the format that was asked for, one at a time.

A weight that is changed goes into a file at once, and the model refers to it there: so no more
than one is in memory, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from llmserve.graphs.library import openvino as ov
from llmserve.graphs.packed_weight import Kind, product_weight, table_weight
from llmserve.graphs.rounding import rounded, whole_group
from llmserve.graphs.scratch import Scratch

_WEIGHTS = (ov.Type.f32, ov.Type.bf16, ov.Type.f16)
_STORED = {"fp32": ov.Type.f32, "fp16": ov.Type.f16, "bf16": ov.Type.bf16}
_NUMBERS = {ov.Type.f32: np.float32, ov.Type.bf16: np.int16, ov.Type.f16: np.float16}
"""What numpy has for them: of bfloat16, the bits."""
_PACKED = ("int8", "int4")
# How many numbers are widened at once.
_PIECE = 1 << 20
Importance: TypeAlias = Mapping[int, torch.Tensor]
"""By the address of a product's weight, the mean square of each of its inputs."""


@dataclass(frozen=True)
class WeightFormat:
    """How weights are stored: ``fp32``, ``fp16``, ``bf16``, ``int8`` or ``int4``.

    ``auto`` changes none: those that are exact in 16 bits are stored in 16 bits.
    """

    name: str = "auto"
    group: int = 0
    """How many numbers in 4 bits share a scale at most; 0 is a whole row."""
    share: float = 1.0
    """The share of the weights between the first and the last that has 4 bits; others have 8."""


def write(
    model: Any,
    path: Path,
    chosen: WeightFormat,
    important: Importance | None = None,
    tell: Callable[[float], None] = lambda _: None,
) -> None:
    """Write the model, and tell the share of its weights that are ready.

    Weights that keep their format are read from where they are.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with Scratch(path.parent) as scratch:
        writer = _Writer(scratch, chosen, important or {})
        writer.change(model, tell)
        ov.save_model(model, str(path), compress_to_fp16=False)


class _Writer:
    def __init__(self, scratch: Scratch, chosen: WeightFormat, important: Importance) -> None:
        self._scratch = scratch
        self._important = important
        self._chosen = chosen
        # The model's constants refer to these and do not own them.
        self._mapped: list[Any] = []

    def change(self, model: Any, tell: Callable[[float], None]) -> None:
        weights = list(_weights(model))
        groups = self._groups(weights)
        whole = sum(weight.numbers for weight in weights)
        done = 0
        for weight, group in zip(weights, groups, strict=True):

            def tell_part(share: float, done: int = done, numbers: int = weight.numbers) -> None:
                tell((done + share * numbers) / whole)

            if self._chosen.name in _PACKED:
                changed = self._packed(weight, group, tell_part) if weight.is_known else None
            else:
                changed = self._stored(weight)
            if changed is not None:
                for consumer in weight.value.get_target_inputs():
                    consumer.replace_source_output(changed)
            done += weight.numbers
            tell(done / whole)
        model.validate_nodes_and_infer_types()

    def _stored(self, weight: _Weight) -> Any:
        constant = weight.constant
        kind = _STORED.get(self._chosen.name) or _exact_type(constant)
        if _type(constant) == kind:
            return None
        values = _tensor(constant).reshape(-1)
        stored = self._scratch.empty((len(values),), _NUMBERS[kind])
        for part in _pieces(len(values)):
            stored[part] = _rounded(values[part].float().numpy(), kind)
        placed = self._place(stored, kind, _shape(constant))
        return (placed if kind == ov.Type.f32 else ov.opset13.convert(placed, "f32")).output(0)

    def _groups(self, weights: Sequence[_Weight]) -> list[int | None]:
        """Return for each weight how many numbers in 4 bits share a scale, None for 8 bits."""
        if self._chosen.name != "int4":
            return [None] * len(weights)
        largest = self._chosen.group
        # The table and the product of the scores lose most, and are what an answer depends on.
        ends = [weight.is_table or weight is weights[-1] for weight in weights]
        middle = [weight for weight, is_end in zip(weights, ends, strict=True) if not is_end]
        wide = _kept_in_8_bits(middle, 1 - self._chosen.share)
        return [
            None if is_end or weight in wide else
            whole_group(weight.inputs, largest if largest > 0 else weight.inputs)
            for weight, is_end in zip(weights, ends, strict=True)
        ]  # fmt: skip

    def _packed(self, weight: _Weight, group: int | None, tell: Callable[[float], None]) -> Any:
        rows = _tensor(weight.constant)
        if weight.is_transposed:
            rows = rows.T
            for product in weight.products:
                product.set_attribute("transpose_b", True)
        outer, width = rows.shape[:-1], rows.shape[-1]
        kind: Kind = "u8" if group is None else "u4"
        # A whole number of 8 bits is near enough for all.
        important = self._important.get(weight.constant.data.ctypes.data) if group else None
        found = rounded(
            rows.reshape(-1, width), kind, group or width, important, tell, self._scratch.empty
        )
        if weight.is_table:
            return table_weight(found, self._place)
        return product_weight(found, self._place, outer)

    def _place(self, data: Any, kind: Any, shape: Any) -> Any:
        # All of it is in the file already.
        mapped = data.reshape(-1).view(np.uint8)
        self._mapped.append(tensor := ov.Tensor(mapped, shape, kind))
        return ov.op.Constant(tensor, True)


@dataclass(frozen=True, eq=False)
class _Weight:
    """A weight's value in float32, the constant that has it, and the products that use it."""

    value: Any
    constant: Any
    products: Sequence[Any]
    is_table: bool
    is_known: bool
    """Whether nothing else uses it than products and tables of vectors."""

    @property
    def is_transposed(self) -> bool:
        """Whether each column is an output, as in GPT-2."""
        return any(not node.get_attributes()["transpose_b"] for node in self.products)

    @property
    def numbers(self) -> int:
        return prod(_shape(self.constant))

    @property
    def inputs(self) -> int:
        return int(_shape(self.constant)[-2 if self.is_transposed else -1])

    @property
    def is_narrowing(self) -> bool:
        """Whether a product has fewer outputs than inputs: keys, values, the end of a layer."""
        return bool(self.inputs > int(_shape(self.constant)[-1 if self.is_transposed else -2]))


def _weights(model: Any) -> Iterator[_Weight]:
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Constant" and _type(node) in _WEIGHTS:
            value = node.output(0)
            uses = value.get_target_inputs()
            if len(uses) == 1 and next(iter(uses)).get_node().get_type_name() == "Convert":
                value = next(iter(uses)).get_node().output(0)
            if len(_shape(node)) > 1 and value.get_element_type() == ov.Type.f32:
                yield _weight(value, node)


def _weight(value: Any, constant: Any) -> _Weight:
    uses = [(port.get_node(), port.get_index()) for port in value.get_target_inputs()]
    products = [node for node, port in uses if (node.get_type_name(), port) == ("MatMul", 1)]
    tables = [node for node, port in uses if (node.get_type_name(), port) == ("Gather", 0)]
    orders = {node.get_attributes()["transpose_b"] for node in products}
    # A table that is a product's weight too has a vector in each row.
    is_alike = len(orders) < 2 and not (tables and False in orders)
    is_known = len(products) + len(tables) == len(uses) and is_alike
    return _Weight(value, constant, products, bool(tables), is_known)


def _kept_in_8_bits(weights: Sequence[_Weight], share: float) -> list[_Weight]:
    """Return those that lose most in 4 bits, with no more than this share of all numbers.

    Products with fewer outputs than inputs come first, and those nearer to an end of the model.
    """
    room = share * sum(weight.numbers for weight in weights)
    last = len(weights) - 1
    order = sorted(
        range(len(weights)),
        key=lambda index: (not weights[index].is_narrowing, min(index, last - index)),
    )
    chosen = []
    for index in order:
        if (room := room - weights[index].numbers) < 0:
            break
        chosen.append(weights[index])
    return chosen


def _shape(node: Any) -> Any:
    return node.get_output_shape(0)


def _type(node: Any) -> Any:
    return node.get_element_type()


def _tensor(constant: Any) -> torch.Tensor:
    """Return a constant's values, which stay where they are."""
    # OpenVINO gives the bits of bfloat16 as float16, which numpy has.
    if _type(constant) == ov.Type.bf16:
        return torch.from_numpy(constant.data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(constant.data)


def _pieces(count: int) -> Iterator[slice]:
    """Return parts of so many numbers, of which the widened copy of one is small."""
    for start in range(0, count, _PIECE):
        yield slice(start, min(start + _PIECE, count))


def _rounded(values: Any, kind: Any) -> Any:
    if kind == ov.Type.bf16:
        return torch.from_numpy(values).bfloat16().view(torch.int16).numpy()
    if kind == ov.Type.f16:
        widest = np.finfo(np.float16).max
        return values.clip(-widest, widest).astype(np.float16)
    return values


def _exact_type(constant: Any) -> Any:
    """Return a type of 16 bits that holds all values, the stored one if there is none."""
    if _type(constant) != ov.Type.f32:
        return _type(constant)
    values = constant.data.reshape(-1)
    parts = [values[part] for part in _pieces(len(values))]
    if not any((part.view(np.uint32) & 0xFFFF).any() for part in parts):
        return ov.Type.bf16
    # A weight beyond the range of float16 becomes infinite, which is not equal.
    with np.errstate(over="ignore"):
        is_exact = all(np.array_equal(part.astype(np.float16), part) for part in parts)
    return ov.Type.f16 if is_exact else ov.Type.f32
