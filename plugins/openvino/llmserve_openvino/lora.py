"""Adds adapters to the products of a converted model: those of all rows of a pass at once.

The graph has two more products beside each one that an adapter adds to. Their matrices are inputs:
those of the adapters that the rows of a pass name, side by side, none for a pass that names none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.graphs import openvino as ov
from llmserve.runtime import (
    Lora,
    LoraColumns,
    LoraError,
    ProductShapes,
    check_lora,
    read_lora_weights,
)

OWN = "llmserve_own_columns"
"""The input that says which columns are each row's own."""
# Traces name an operation after the module that it is in; here, that is in one of ours.
_NAME = re.compile(r"__module\.(?:_model\.)?(?P<module>[A-Za-z0-9_.]+)/")
_LARGEST_BF16 = float(np.array(0x7F7F0000, np.uint32).view(np.float32))


class OpenVinoProducts:
    """Implements :class:`llmserve.runtime.AdapterHome`.

    ``half`` says whether the model computes in bfloat16, ``exact`` that its scores may not depend
    on what else is in a pass, which those with adapters would.
    """

    def __init__(self, shapes: ProductShapes, *, half: bool, exact: bool = False) -> None:
        self._shapes, self._half, self._exact = shapes, half, exact
        self.stacks: dict[str, tuple[Any, Any]] = {}
        """The first and the second matrices of all loaded adapters, by the names of modules."""
        self._ranks: dict[str, int] = {}
        self.columns = LoraColumns({})
        self.changes = 0
        """How often the matrices have changed."""

    @property
    def targets(self) -> frozenset[str]:
        """The modules that the graph has to add to."""
        return frozenset(self.stacks)

    def expect(self, lora: Lora) -> None:
        """Have the graph add to the modules of an adapter before that is loaded."""
        for name in lora.shapes:
            if name not in self.stacks:
                first, second = (self._zeros(self.columns.count, n) for n in self._shapes[name])
                self.stacks[name] = first, second

    def fits(self, lora: Lora) -> None:
        if self._exact:
            raise LoraError("cannot be used by a model that was built with exact_batches")
        check_lora(lora, self._shapes)

    def size(self, lora: Lora) -> int:
        # It has a place in every product that any adapter adds to.
        each = (sum(self._shapes[name]) for name in {*lora.shapes, *self.stacks})
        return (2 if self._half else 4) * lora.rank * sum(each)

    def load(self, key: str, lora: Lora) -> None:
        largest = _LARGEST_BF16 if self._half else float(np.finfo(np.float32).max)
        pairs = {name: pair for name, *pair in read_lora_weights(lora, largest)}
        self.expect(lora)
        for name, stack in self.stacks.items():
            pair = pairs.get(name)
            added = (
                map(self._stored, pair)
                if pair
                else (self._zeros(lora.rank, n) for n in self._shapes[name])
            )
            first, second = (np.concatenate(both) for both in zip(stack, added, strict=True))
            self.stacks[name] = first, second
        self._arrange({**self._ranks, key: lora.rank})

    def unload(self, key: str) -> None:
        columns = self.columns[key]
        for name, (first, second) in self.stacks.items():
            self.stacks[name] = np.delete(first, columns, 0), np.delete(second, columns, 0)
        self._arrange({name: rank for name, rank in self._ranks.items() if name != key})

    def _arrange(self, ranks: dict[str, int]) -> None:
        self._ranks, self.columns = ranks, LoraColumns(ranks)
        self.changes += 1

    def inputs(self, columns: slice) -> Mapping[str, Any]:
        """Return the matrices that a pass reads, without copying them."""
        kind = _kind(half=self._half)
        return {
            name: ov.Tensor(part[columns], ov.Shape(part[columns].shape), kind)
            for module, pair in self.stacks.items()
            for name, part in zip(_names(module), pair, strict=True)
        }

    def _zeros(self, rank: int, size: int) -> npt.NDArray[Any]:
        return np.zeros((rank, size), np.uint16 if self._half else np.float32)

    def _stored(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return numbers in the model's type; numpy has the bits of bfloat16 as whole numbers."""
        values = np.ascontiguousarray(values)
        if not self._half:
            return values
        bits = values.view(np.uint32)
        # To the nearest, of two to the even one.
        rounded: npt.NDArray[Any] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return rounded.astype(np.uint16)


def product_shapes(model: Any) -> ProductShapes:
    """Return the inputs and outputs of each product of a token's vector with a matrix."""
    return {name: _shape(nodes[0]) for name, nodes in _products(model).items()}


def add_products(model: Any, modules: Sequence[str], *, half: bool) -> None:
    """Add to the products of modules what adapters add, in a model whose rows are single tokens."""
    ops, kind = ov.opset13, _kind(half=half)
    found = _products(model)
    own = _parameter(OWN, [-1, -1], ov.Type.boolean)
    spread = ops.unsqueeze(own, ops.constant(np.int64(1)))
    parameters = [own]
    for module in modules:
        matrices = []
        for name, size in zip(_names(module), _shape(found[module][0]), strict=True):
            parameters.append(matrix := _parameter(name, [-1, size], kind))
            matrices.append(ops.convert(matrix, "f32") if half else matrix)
        for node in found[module]:
            values, product = node.input_value(0), node.output(0)
            consumers = product.get_target_inputs()
            mask = spread if values.get_partial_shape().rank.get_length() > 2 else own
            part = ops.matmul(values, matrices[0], False, True)
            # What others' columns have may be no number: it is replaced, and not multiplied by 0.
            part = ops.select(mask, part, ops.constant(np.float32(0)))
            whole = ops.add(product, ops.matmul(part, matrices[1], False, False))
            for consumer in consumers:
                consumer.replace_source_output(whole.output(0))
    model.add_parameters(parameters)
    model.validate_nodes_and_infer_types()


def _products(model: Any) -> dict[str, list[Any]]:
    """Return the products with a matrix that is known, by the names of their modules."""
    found: dict[str, list[Any]] = {}
    for node in model.get_ordered_ops():
        name = _NAME.match(node.get_friendly_name())
        if node.get_type_name() == "MatMul" and name:
            values, matrix = node.input(0).get_partial_shape(), node.input(1).get_partial_shape()
            is_product = values.rank.is_static and values[0].is_dynamic and len(values) in (2, 3)
            if is_product and matrix.is_static and len(matrix) == 2:
                found.setdefault(name["module"], []).append(node)
    return found


def _shape(node: Any) -> tuple[int, int]:
    rows, columns = (axis.get_length() for axis in node.input(1).get_partial_shape())
    return (columns, rows) if node.get_attributes()["transpose_b"] else (rows, columns)


def _names(module: str) -> tuple[str, str]:
    return f"{module}.lora_A", f"{module}.lora_B"


def _parameter(name: str, shape: Sequence[int], kind: Any) -> Any:
    parameter = ov.opset13.parameter(shape, kind, name=name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter


def _kind(*, half: bool) -> Any:
    return ov.Type.bf16 if half else ov.Type.f32
