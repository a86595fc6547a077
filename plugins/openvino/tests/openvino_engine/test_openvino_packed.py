"""Weights in few bits: their values, OpenVINO's products of them, and models that have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llmserve.graphs import PackedWeight, StoredWeights, is_readable, packed, parts, unpacked
from llmserve.graphs import openvino as ov
from llmserve.graphs.packed_weight import Kind, product_weight, table_weight
from llmserve.testing.tiny_models import make_model
from llmserve_openvino.compare import difference
from llmserve_openvino.trace import convert

KINDS: tuple[Kind, ...] = ("u4", "u8", "i8")
ZEROS = ("none", "one", "whole", "fraction")


def some_weight(kind: Kind, zeros: str, shape: tuple[int, int], group: int) -> PackedWeight:
    rng = np.random.default_rng(3)
    values = rng.integers(0, 16 if kind == "u4" else 256, shape, dtype=np.uint8)
    grouped = (shape[0], shape[1] // group)
    chosen: dict[str, Any] = {
        "none": None,
        "one": 8,
        "whole": rng.integers(0, 16, grouped, dtype=np.uint8),
        "fraction": (15 * rng.random(grouped)).astype(np.float16).astype(np.float32),
    }
    scales = (
        (rng.random(grouped) / (8 if kind == "u4" else 128)).astype(np.float16).astype(np.float32)
    )
    integers = packed(values) if kind == "u4" else values
    return PackedWeight(kind, integers, group, scales, chosen[zeros])


def in_float32(weight: PackedWeight) -> Any:
    """Compute a weight number by number, as its documentation says it."""
    rows, width = weight.shape
    values = np.empty((rows, width), np.float32)
    for row in range(rows):
        for column in range(width):
            byte = int(weight.integers[row, column // 2 if weight.kind == "u4" else column])
            if weight.kind == "u4":
                byte = byte >> 4 if column % 2 else byte & 15
            elif weight.kind == "i8":
                byte = byte - 256 if byte > 127 else byte
            group = column // weight.group
            zero = weight.zeros[row, group] if isinstance(weight.zeros, np.ndarray) else (
                weight.zeros or 0
            )  # fmt: skip
            values[row, column] = (byte - float(zero)) * float(weight.scales[row, group])
    return values


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("kind", KINDS)
def test_its_values_are_those_that_it_says(kind: Kind, zeros: str) -> None:
    weight = some_weight(kind, zeros, (6, 24), 8)
    expected = in_float32(weight)
    np.testing.assert_array_equal(weight.dequantised(), expected)
    np.testing.assert_array_equal(weight.dequantised(slice(2, 4)), expected[2:4])
    rows = np.array([5, 0, 5])
    np.testing.assert_array_equal(weight.dequantised(rows), expected[rows])
    np.testing.assert_array_equal(weight.in_bytes().dequantised(), expected)


def test_numbers_of_4_bits_are_two_in_a_byte() -> None:
    values = np.arange(16, dtype=np.uint8).reshape(2, 8)
    assert packed(values)[0, 0] == 0x10
    np.testing.assert_array_equal(unpacked(packed(values)), values)


def test_what_does_not_fit_together_is_refused() -> None:
    scales, values = np.ones((2, 3), np.float32), np.zeros((2, 24), np.uint8)
    with pytest.raises(ValueError, match="scales for"):
        PackedWeight("u8", values, 16, scales)
    with pytest.raises(ValueError, match="scales for"):
        PackedWeight("u4", values, 8, scales)
    with pytest.raises(ValueError, match="zero points"):
        PackedWeight("u8", values, 8, scales, np.zeros((3, 2), np.uint8))
    with pytest.raises(ValueError, match="scales in float16"):
        PackedWeight("u8", values, 8, scales.astype(np.float16))


def compiled(node: Any, parameter: Any, dynamic: int = 0) -> Any:
    options = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": dynamic}
    return ov.Core().compile_model(ov.Model([node], [parameter]), "CPU", options)


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_computes_with_its_values(kind: Kind, zeros: str, group: int) -> None:
    weight = some_weight(kind, zeros, (48, 64), group)
    rows = ov.opset13.parameter([-1, 64], ov.Type.f32)
    product = ov.opset13.matmul(rows, product_weight(weight), False, True)
    model = compiled(product, rows)
    values = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    found = model([values])[0]
    np.testing.assert_allclose(found, values @ weight.dequantised().T, atol=1e-4)
    # Widened beforehand, it would take several times the memory.
    nodes = model.get_runtime_model().get_ops()
    types = {node.get_output_element_type(0) for node in nodes}
    assert getattr(ov.Type, kind) in types


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("kind", ["u8", "i8"])
def test_single_rows_of_a_table_are_gathered(kind: Kind, zeros: str) -> None:
    weight = some_weight(kind, zeros, (48, 64), 16)
    ids = ov.opset13.parameter([-1, -1], ov.Type.i64)
    gathered = ov.opset13.gather(table_weight(weight), ids, ov.opset13.constant(np.int64(0)))
    chosen = np.array([[3, 47, 0], [3, 3, 11]])
    found = compiled(gathered, ids)([chosen])[0]
    np.testing.assert_allclose(found, weight.dequantised()[chosen], rtol=2e-3, atol=1e-6)
    with pytest.raises(ValueError, match="a byte for each"):
        table_weight(some_weight("u4", zeros, (48, 64), 16))


def pack(model: Any, kind: Kind) -> dict[torch.nn.Module, PackedWeight]:
    """Return the large weights of a model rounded to few bits, a tied one once."""
    found: dict[int, PackedWeight] = {}
    chosen = {}
    for module in model.modules():
        if is_readable(module):
            weight: Any = module.weight
            is_transposed = type(module).__name__ == "Conv1D"
            values = (weight.T if is_transposed else weight).float().numpy()
            if weight.data_ptr() not in found:
                found[weight.data_ptr()] = rounded(values, kind)
            chosen[module] = found[weight.data_ptr()]
    return chosen


def rounded(values: Any, kind: Kind, group: int = 16) -> PackedWeight:
    rows, width = values.shape
    values = np.ascontiguousarray(values)
    groups = values.reshape(rows, width // group, group)
    zero, span = {"u4": (8, 7), "u8": (128, 127), "i8": (0, 127)}[kind]
    scales = (np.abs(groups).max(-1) / span).astype(np.float32)
    scales[scales == 0] = 1
    whole = np.rint(groups / scales[..., None].astype(np.float32)) + zero
    integers = whole.clip(-127 if kind == "i8" else 0, 2 * span + 1 if zero else 127)
    integers = integers.astype(np.int8 if kind == "i8" else np.uint8).reshape(rows, width)
    bytes_ = packed(integers) if kind == "u4" else integers.view(np.uint8)
    return PackedWeight(kind, bytes_, group, scales, zero or None)


def with_values(model: Any, weights: dict[torch.nn.Module, PackedWeight]) -> Any:
    """Give a model the values of its packed weights in float32."""
    for module, weight in weights.items():
        values = torch.from_numpy(weight.dequantised())
        is_transposed = type(module).__name__ == "Conv1D"
        module.weight.data.copy_(values.T if is_transposed else values)  # type: ignore[operator]
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gemma", "gpt2", "llama", "opt"])
def test_a_model_with_packed_weights_answers_as_with_their_values(family: str, kind: Kind) -> None:
    model = make_model(family).requires_grad_(False)
    model.set_attn_implementation("sdpa")
    weights = pack(model, kind)
    assert len(weights) > 8
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        expected = with_values(model, weights)(input_ids=ids).logits
    stored = StoredWeights(model, weights)
    with torch.inference_mode(), stored.computing():
        torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-4, rtol=0)
    assert difference(model, stored, convert(model, stored)) < 1e-3
    found = [difference(model, stored, convert(model, stored)) for _ in parts(model, stored, 1)]
    assert len(found) == 2
    assert max(found) < 1e-3


@pytest.mark.filterwarnings("ignore")
def test_a_part_of_a_model_leaves_the_weights_of_its_other_layers_packed() -> None:
    model = make_model("llama").requires_grad_(False)
    model.set_attn_implementation("sdpa")
    weights = pack(model, "u4")
    stored = StoredWeights(model, weights)
    for _ in parts(model, stored, 1):
        convert(model, stored)
    in_memory: list[Any] = [module.weight for module in weights]
    assert {weight.untyped_storage().nbytes() for weight in in_memory} == {4}, "placeholders"
