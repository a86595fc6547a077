"""Blocks of GGUF files: packed as they are, whatever is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.graphs import Scratch
from llmserve.plugin import ModelSource, has_kept_weights
from llmserve_openvino.gguf_blocks import READ, NoNumbers, packed_rows

NEAR = ("Q5_1", "Q5_K")
"""Those with finer steps for a whole zero point; all others are exact but for float16's digits."""
_SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def blocks_of(kind: str, content: bytes = b"", rows: int = 3, count: int = 2) -> Any:
    """Return rows of blocks of any content, with scales as those of a model."""
    _, length = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (rows, count, length), dtype=np.uint8)
    for start in _SCALES.get(kind, (0,)):
        scales = (0.001 + rng.random((rows, count, 1)) / 100).astype("<f2")
        blocks[..., start : start + 2] = scales.view(np.uint8)
    flat = blocks.reshape(-1)
    flat[: len(content)] = np.frombuffer(content[: flat.size], np.uint8)
    return blocks


def widened(kind: str, blocks: Any) -> Any:
    return gguf.dequantize(blocks.reshape(len(blocks), -1), gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", READ)
def test_blocks_keep_their_values(kind: str) -> None:
    blocks = blocks_of(kind)
    weight, expected = packed_rows(kind, blocks), widened(kind, blocks)
    assert weight.shape == expected.shape
    wrong = np.abs(weight.dequantised() - expected).reshape(*weight.scales.shape, -1).max(-1)
    largest = np.abs(expected).reshape(*weight.scales.shape, -1).max(-1)
    # With finer steps, half of one; those are other ones where all are on one side of zero.
    steps, share = (0.5 * np.abs(weight.scales), 2e-3) if kind in NEAR else (0, 2e-6)
    assert (wrong <= share * largest + steps).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_is_alike_or_on_one_side_of_zero_is_kept(kind: str) -> None:
    rng = np.random.default_rng(1)
    values = (rng.standard_normal((4, 64)) / 20).astype(np.float32)
    values[0], values[1], values[2] = 0, 0.02, 5 + np.abs(values[2]) / 100
    quantized = gguf.quantize(values, gguf.GGMLQuantizationType[kind]).reshape(4, 2, -1)
    found, expected = packed_rows(kind, quantized).dequantised(), widened(kind, quantized)
    np.testing.assert_allclose(found, expected, rtol=4e-3, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from([*READ]), content=st.binary(min_size=40, max_size=420))
def test_any_content_of_blocks_is_read_or_refused(kind: str, content: bytes) -> None:
    blocks = blocks_of(kind, content)
    try:
        weight = packed_rows(kind, blocks)
    except NoNumbers:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isfinite(weight.dequantised()).all()


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_refused(kind: str, number: float) -> None:
    blocks = blocks_of(kind)
    for start in _SCALES.get(kind, (0,)):
        blocks[1, 1, start : start + 2] = np.array([number], "<f2").view(np.uint8)
    with pytest.raises(NoNumbers, match="are no numbers"):
        packed_rows(kind, blocks)


def test_a_list_in_a_folder_of_somebody_else_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "gguf_weights.json").write_text('{"file": "/etc/passwd", "weights": []}')
    assert not has_kept_weights(ModelSource("m", tmp_path))


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path) -> None:
    with Scratch(tmp_path) as scratch, pytest.raises(OSError, match=r"No space|too large"):
        scratch.empty((1 << 58,), np.uint8)
