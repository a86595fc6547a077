"""Writes a converted model with its weights in the format that was asked for, one at a time.

A weight that is changed goes into a file at once, and the model refers to it there: so no more
than one is in memory, however many there are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llmserve_openvino.library import openvino as ov

_WEIGHTS = (ov.Type.f32, ov.Type.bf16, ov.Type.f16)
_STORED = {"fp32": ov.Type.f32, "fp16": ov.Type.f16, "bf16": ov.Type.bf16}
# OpenVINO maps constants to whole lines of a processor's cache.
_LINE = 64


def write(
    model: Any, path: Path, settings: dict[str, Any], tell: Callable[[float], None] = lambda _: None
) -> None:
    """Write the model, and tell the share of its weights that are ready.

    Weights that keep their format are read from where they are.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent) as file:
        writer = _Writer(file, settings)
        writer.change(model, tell)
        ov.save_model(model, str(path), compress_to_fp16=False)


class _Writer:
    def __init__(self, file: BinaryIO, settings: dict[str, Any]) -> None:
        self._file = file
        self._settings = settings
        self._format: str = settings["weight_format"]
        # The model's constants refer to these and do not own them.
        self._mapped: list[Any] = []

    def change(self, model: Any, tell: Callable[[float], None]) -> None:
        if self._format == "int4" and self._settings["int4_ratio"] < 1:
            # Which layers are int8 follows from a comparison of all.
            _compress(model, self._settings, "int4")
            return
        weights = list(_weights(model))
        for count, (value, constant) in enumerate(weights, 1):
            is_last = constant is weights[-1][1]
            changed = self._changed(value, constant, is_last=is_last)
            if changed is not None:
                for consumer in value.get_target_inputs():
                    consumer.replace_source_output(changed)
            tell(count / len(weights))
        model.validate_nodes_and_infer_types()

    def _changed(self, value: Any, constant: Any, *, is_last: bool) -> Any:
        if self._format in ("int8", "int4"):
            return self._compressed(value, constant, is_last=is_last)
        kind = _STORED.get(self._format) or _exact_type(constant)
        if _type(constant) == kind:
            return None
        stored = _rounded(_in_float32(constant), kind)
        placed = self._place(stored, kind, _shape(constant))
        return (placed if kind == ov.Type.f32 else ov.opset13.convert(placed, "f32")).output(0)

    def _compressed(self, value: Any, constant: Any, *, is_last: bool) -> Any:
        """Compress a weight in a model of its own, and take it from there."""
        consumers = [port.get_node() for port in value.get_target_inputs()]
        use = next((node for node in consumers if node.get_type_name() == "MatMul"), consumers[0])
        kind = use.get_type_name()
        ops = ov.opset13
        tensor = ov.Tensor(constant.data, _shape(constant), _type(constant))
        alone = ov.op.Constant(tensor, True)
        weight = alone if _type(constant) == ov.Type.f32 else ops.convert(alone, "f32")
        if kind == "MatMul" and use.input_value(1) == value:
            facts = use.get_attributes()
            rows = ops.parameter([-1, -1], ov.Type.f32)
            answer = ops.matmul(rows, weight, False, facts["transpose_b"])
            port = 1
        elif kind == "Gather" and use.input_value(0) == value:
            rows = ops.parameter([-1], ov.Type.i64)
            answer, port = ops.gather(weight, rows, ops.constant(np.int64(0))), 0
        else:
            return None
        # The table and the product of the scores lose most, and are what an answer depends on.
        is_end = is_last or any(node.get_type_name() == "Gather" for node in consumers)
        model = ov.Model([answer], [rows])
        _compress(model, self._settings, "int8" if is_end else self._format)
        compressed = model.outputs[0].get_node().input_value(0).get_node().input_value(port)
        self._move(compressed.get_node())
        return compressed

    def _move(self, node: Any) -> None:
        """Have the constants of a compressed weight in the file."""
        for port in node.inputs():
            source = port.get_source_output().get_node()
            if source.get_type_name() != "Constant":
                self._move(source)
            elif source.get_byte_size() > _LINE:
                placed = self._place(source.data, _type(source), _shape(source))
                port.replace_source_output(placed.output(0))

    def _place(self, data: Any, kind: Any, shape: Any) -> Any:
        start = self._file.seek(0, 2)
        start += self._file.write(bytes(-start % _LINE))
        data.tofile(self._file)
        self._file.flush()
        size = self._file.tell() - start
        mapped = np.memmap(self._file, np.uint8, "r", start, (size,))
        self._mapped.append(tensor := ov.Tensor(mapped, shape, kind))
        return ov.op.Constant(tensor, True)


def _weights(model: Any) -> Iterator[tuple[Any, Any]]:
    """Return each weight's value in float32, and the constant that has it."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Constant" and _type(node) in _WEIGHTS:
            value = node.output(0)
            uses = value.get_target_inputs()
            if len(uses) == 1 and next(iter(uses)).get_node().get_type_name() == "Convert":
                value = next(iter(uses)).get_node().output(0)
            if len(_shape(node)) > 1 and value.get_element_type() == ov.Type.f32:
                yield value, node


def _shape(node: Any) -> Any:
    return node.get_output_shape(0)


def _type(node: Any) -> Any:
    return node.get_element_type()


def _in_float32(constant: Any) -> Any:
    # OpenVINO gives the bits of bfloat16 as float16, which numpy has.
    if _type(constant) == ov.Type.bf16:
        return (constant.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(constant.data, np.float32)


def _rounded(values: Any, kind: Any) -> Any:
    if kind == ov.Type.bf16:
        import torch

        return torch.from_numpy(values).bfloat16().view(torch.int16).numpy()
    if kind == ov.Type.f16:
        widest = np.finfo(np.float16).max
        return values.clip(-widest, widest).astype(np.float16)
    return values


def _exact_type(constant: Any) -> Any:
    """Return a type of 16 bits that holds all values, the stored one if there is none."""
    if _type(constant) != ov.Type.f32:
        return _type(constant)
    values = constant.data
    if not (values.view(np.uint32) & 0xFFFF).any():
        return ov.Type.bf16
    # A weight beyond the range of float16 becomes infinite, which is not equal.
    with np.errstate(over="ignore"):
        is_exact = np.array_equal(values.astype(np.float16), values)
    return ov.Type.f16 if is_exact else ov.Type.f32


def _compress(model: Any, settings: dict[str, Any], weight_format: str) -> None:
    import nncf

    if weight_format == "int8":
        nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        return
    ratio = settings["int4_ratio"]
    nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_ASYM,
        group_size=settings["int4_group"],
        ratio=ratio,
        # A weight that is compressed alone would count as the last layer.
        all_layers=ratio == 1,
        advanced_parameters=nncf.AdvancedCompressionParameters(
            group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST
        ),
    )
