"""Weights that are rounded to 4 and 8 bits: how near they stay, and which are rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import llmserve.graphs as formats
from llmserve.graphs import StoredWeights, unpacked
from llmserve.graphs import openvino as ov
from llmserve.graphs.packed_weight import Kind
from llmserve.graphs.rounding import rounded, whole_group
from llmserve.plugin import UnservedError
from llmserve.testing.tiny_models import make_model
from llmserve_openvino.importance import importance
from llmserve_openvino.trace import convert


def plain(values: np.ndarray[Any, Any], group: int) -> Any:
    """Round to 4 bits between the least and the largest number of each group."""
    groups = values.reshape(len(values), -1, group)
    low = np.minimum(groups.min(-1, keepdims=True), 0)
    scale = (np.maximum(groups.max(-1, keepdims=True), 0) - low) / 15
    zero = np.rint(-low / scale)
    whole = np.clip(np.rint(groups / scale) + zero, 0, 15)
    return ((whole - zero) * scale).reshape(values.shape)


def weight(rows: int = 64, width: int = 256, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    # As weights are: most near zero, a few far from it.
    return torch.from_numpy((rng.standard_t(5, (rows, width)) * 0.02).astype(np.float32))


def error(found: Any, values: torch.Tensor, counts: Any = 1.0) -> float:
    return float((counts * (np.asarray(found) - values.numpy()) ** 2).sum())


def test_4_bits_are_nearer_than_plain_rounding() -> None:
    values = weight()
    fitted = error(rounded(values, "u4", 32).dequantised(), values)
    assert fitted < 0.94 * error(plain(values.numpy(), 32), values)


def test_columns_that_count_more_are_nearer() -> None:
    values, counts = weight(), torch.ones(256)
    counts[::16] = 100
    by_all = rounded(values, "u4", 32).dequantised()
    by_some = rounded(values, "u4", 32, counts).dequantised()
    assert error(by_some, values, counts.numpy()) < 0.7 * error(by_all, values, counts.numpy())
    # No text says that a column never counts.
    none = rounded(values, "u4", 32, torch.zeros(256)).dequantised()
    np.testing.assert_array_equal(none, by_all)
    some = torch.zeros(256)
    some[3] = 1
    assert error(rounded(values, "u4", 32, some).dequantised(), values) < 2 * error(by_all, values)


def test_8_bits_lose_next_to_nothing() -> None:
    values = weight()
    found = rounded(values, "u8", 256)
    assert found.zeros is not None
    assert error(found.dequantised(), values) < 3e-4 * float(values.square().sum())


@pytest.mark.parametrize("kind", ["u4", "u8"])
def test_groups_without_a_range_are_exact(kind: Kind) -> None:
    values = torch.zeros(4, 32)
    values[1], values[2], values[3, 7] = 0.5, -0.25, 3
    found = rounded(values, kind, 32).dequantised()
    np.testing.assert_array_equal(found[0], 0)
    np.testing.assert_allclose(found, values.numpy(), rtol=1e-3)


def test_numbers_beyond_what_a_scale_can_be_stay_finite() -> None:
    values = torch.tensor([[3e7, -3e7] * 16, [1e-30, -1e-30] * 16])
    found = rounded(values, "u4", 32).dequantised()
    assert np.isfinite(found).all()
    assert (found[0, ::2] > 1e5).all()
    assert np.abs(found[1]).max() <= 1


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_is_refused(wrong: float) -> None:
    values = weight(4, 64)
    values[2, 5] = wrong
    with pytest.raises(UnservedError, match="no finite numbers"):
        rounded(values, "u4", 32)


def test_pieces_layouts_and_types_make_no_difference() -> None:
    values = weight(700, 256).bfloat16()
    shares: list[float] = []
    found = rounded(values, "u4", 32, tell=shares.append)
    assert len(shares) > 1
    assert shares == sorted(shares)
    assert shares[-1] == 1
    turned = rounded(values.T.contiguous().T, "u4", 32)
    one = rounded(values[699:].float(), "u4", 32)
    np.testing.assert_array_equal(found.integers, turned.integers)
    np.testing.assert_array_equal(found.integers[699:], one.integers)
    assert unpacked(found.integers).max() == 15


def test_several_threads_round_the_same_and_torch_keeps_its_own() -> None:
    values = weight(rows=2000)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(rounded(values, "u4", 32))
            assert torch.get_num_threads() == threads
            with pytest.raises(UnservedError):
                rounded(torch.full((64, 256), np.nan), "u4", 32)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(found[0].integers, found[1].integers)
    np.testing.assert_array_equal(found[0].scales, found[1].scales)


@pytest.mark.parametrize(
    ("width", "largest", "group"),
    [(576, 32, 32), (48, 32, 24), (1000, 32, 20), (99, 32, None), (62, 32, None), (54, 32, 18)],
)
def test_a_group_is_the_largest_that_rows_consist_of(
    width: int, largest: int, group: int | None
) -> None:
    assert whole_group(width, largest) == group


def written(family: str, tmp_path: Any, **options: Any) -> tuple[Any, Any, list[float]]:
    """Convert a tiny model of a family, and read what is written."""
    model = make_model(family).requires_grad_(False)
    model.set_attn_implementation("sdpa")
    stored = StoredWeights(model)
    chosen = formats.WeightFormat(**{"name": "int4", "group": 32, **options})
    shares: list[float] = []
    path = tmp_path / "model.xml"
    important = importance(model, stored)
    formats.write(convert(model, stored), path, chosen, important, shares.append)
    return ov.Core().read_model(path), model, shares


def types(model: Any) -> list[str]:
    """Return the types of whole numbers of the weights, in their order."""
    names = []
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Constant" and list(node.get_output_shape(0))[-1:] > [1]:
            names.append(node.get_element_type().get_type_name())
    return [name for name in names if name in ("u4", "u8")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_ends_are_in_8_bits_and_the_middle_in_4(family: str, tmp_path: Any) -> None:
    found, model, shares = written(family, tmp_path)
    kinds = types(found)
    assert kinds[0] == "u8"
    assert kinds.count("u4") >= 4
    if not model.config.tie_word_embeddings:
        assert kinds[-1] == "u8"
    assert shares == sorted(shares)
    assert shares[-1] == 1


@pytest.mark.filterwarnings("ignore")
def test_narrowing_products_stay_in_8_bits_up_to_a_share(tmp_path: Any) -> None:
    counts = [
        types(written("llama", tmp_path, share=ratio)[0]).count("u4") for ratio in (1.0, 0.68, 0.0)
    ]
    assert counts[0] > counts[1] > counts[2] == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_a_model_answers_nearly_as_before(family: str, weights: str, tmp_path: Any) -> None:
    found, _, _ = written(family, tmp_path, name=weights)
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    request = ov.Core().compile_model(found, "CPU", exact).create_infer_request()
    ids = np.arange(20)[None]
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": ids}
    request.infer({**inputs, "beam_idx": np.zeros(1, np.int32)})
    answered = torch.from_numpy(request.get_tensor("logits").data.copy())
    with torch.inference_mode():
        expected = make_model(family)(input_ids=torch.from_numpy(ids)).logits
    lost = float((answered - expected).norm() / expected.norm())
    assert 0 < lost < {"int8": 0.02, "int4": 0.3}[weights]
