"""Quantised weights of a checkpoint from anywhere: read as what they stand for, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.graphs import PackedWeight
from llmserve.plugin import Quantised
from llmserve_openvino.quantised_forms import Unreadable, read_weight

ROWS, WIDTH, GROUP = 16, 64, 16
SHAPE = (ROWS, WIDTH)
Tensors = dict[str, torch.Tensor]


def _words(rng: Any, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, shape, np.int64).astype(np.int32))


def _scales(rng: Any, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.uniform(0.001, 0.01, shape).astype(np.float32)).half()


def _gptq(rng: Any) -> Tensors:
    return {
        "qweight": _words(rng, WIDTH // 8, ROWS),
        "qzeros": _words(rng, WIDTH // GROUP, ROWS // 8),
        "scales": _scales(rng, WIDTH // GROUP, ROWS),
        "g_idx": torch.from_numpy(rng.permutation(WIDTH) // GROUP).int(),
    }


def _awq(rng: Any) -> Tensors:
    return {
        "qweight": _words(rng, WIDTH, ROWS // 8),
        "qzeros": _words(rng, WIDTH // GROUP, ROWS // 8),
        "scales": _scales(rng, WIDTH // GROUP, ROWS),
    }


def _packed(rng: Any) -> Tensors:
    return {
        "weight_packed": _words(rng, ROWS, WIDTH // 8),
        "weight_scale": _scales(rng, ROWS, WIDTH // GROUP),
        "weight_zero_point": _words(rng, ROWS // 8, WIDTH // GROUP),
        "weight_g_idx": torch.from_numpy(rng.permutation(WIDTH) // GROUP).int(),
        "weight_shape": torch.tensor(SHAPE),
    }


def _bytes(rng: Any) -> Tensors:
    return {
        "weight": torch.from_numpy(rng.integers(-128, 128, SHAPE, np.int64).astype(np.int8)),
        "weight_scale": _scales(rng, ROWS, WIDTH // GROUP),
    }


def _float8(rng: Any) -> Tensors:
    values = torch.from_numpy(rng.uniform(-400, 400, SHAPE)).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": _scales(rng, ROWS // 8, WIDTH // 32).float()}


KINDS: dict[str, tuple[Quantised, Callable[[Any], Tensors]]] = {
    "gptq": (Quantised("gptq", 4, GROUP, act_order=True), _gptq),
    "awq": (Quantised("awq", 4, GROUP, form="gemm"), _awq),
    "packed": (Quantised("compressed-tensors", 4, GROUP, form="pack-quantized"), _packed),
    "bytes": (Quantised("compressed-tensors", 8, GROUP, form="int-quantized"), _bytes),
    "float8": (Quantised("fp8", block=(8, 32)), _float8),
}
HUGE = (1, 3, 7, 24, 48, 65, 1 << 31, 1 << 62)
NUMBERS = (float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 1e-9, 6e4, 3e38)

WAYS = ("lose", "cut", "grow", "turn", "flatten", "retype", "fill", "one")
TYPES = (
    torch.float32, torch.bfloat16, torch.float64, torch.float8_e5m2, torch.int8, torch.uint8,
    torch.int64, torch.bool,
)  # fmt: skip


def meant(kind: str, tensors: Tensors) -> Any:
    """Compute what is stored number by number, as the formats say it."""
    found = KINDS[kind][0]
    if kind == "float8":
        scale = tensors["weight_scale_inv"].float()
        blocks = scale.repeat_interleave(8, 0).repeat_interleave(32, 1)
        return (tensors["weight"].float() * blocks).bfloat16().float().numpy()
    whole = np.zeros(SHAPE, np.float64)
    for row in range(ROWS):
        for column in range(WIDTH):
            group, place = column // GROUP, column
            if kind == "gptq":
                group = int(tensors["g_idx"][column])
                number = _bits(tensors["qweight"][place // 8, row], place % 8)
                zero = _bits(tensors["qzeros"][group, row // 8], row % 8) + 1
                scale = tensors["scales"][group, row]
            elif kind == "awq":
                order = [0, 4, 1, 5, 2, 6, 3, 7][row % 8]
                number = _bits(tensors["qweight"][column, row // 8], order)
                zero = _bits(tensors["qzeros"][group, row // 8], order)
                scale = tensors["scales"][group, row]
            elif kind == "packed":
                group = int(tensors["weight_g_idx"][column])
                number = _bits(tensors["weight_packed"][row, place // 8], place % 8)
                zero = _bits(tensors["weight_zero_point"][row // 8, group], row % 8)
                scale = tensors["weight_scale"][row, group]
            else:
                number, zero = int(tensors["weight"][row, column]), 0
                scale = tensors["weight_scale"][row, group]
            whole[row, column] = (number - zero) * float(scale)
    assert found.group == GROUP
    return whole


def _bits(word: torch.Tensor, place: int) -> int:
    return int(word) >> 4 * place & 15


def in_float32(weight: PackedWeight | torch.Tensor) -> Any:
    if isinstance(weight, PackedWeight):
        return weight.dequantised()
    return weight.float().numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_what_its_format_says(kind: str) -> None:
    found, make = KINDS[kind]
    tensors = make(np.random.default_rng(2))
    values = in_float32(read_weight(found, tensors, SHAPE))
    np.testing.assert_allclose(values, meant(kind, tensors), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["awq", "packed", "bytes"])
def test_scales_with_which_a_weight_is_no_number_are_refused(kind: str) -> None:
    found, make = KINDS[kind]
    tensors = make(np.random.default_rng(2))
    name = next(name for name in tensors if name.endswith(("scales", "weight_scale")))
    tensors[name] = torch.full(tensors[name].shape, 3e38)
    with pytest.raises(Unreadable, match="scales"):
        read_weight(found, tensors, SHAPE)


@st.composite
def damage(draw: Any) -> Callable[[Tensors], None]:
    """Return something that happens to a tensor on its way."""
    what = draw(
        st.sampled_from(["lose", "cut", "grow", "turn", "flatten", "retype", "fill", "one"])
    )
    at = draw(st.integers(0, 1 << 16))
    number = draw(st.sampled_from(NUMBERS))
    dtype = draw(st.sampled_from(TYPES))

    def happen(tensors: Tensors) -> None:
        name = sorted(tensors)[at % len(tensors)]
        tensor = tensors[name]
        if what == "lose":
            del tensors[name]
        elif what == "cut":
            tensors[name] = tensor[:-1] if at % 2 else tensor[..., :-1]
        elif what == "grow":
            tensors[name] = torch.cat([tensor, tensor])
        elif what == "turn":
            tensors[name] = tensor.permute(*reversed(range(tensor.ndim))).contiguous()
        elif what == "flatten":
            tensors[name] = tensor.flatten() if at % 2 else tensor[None]
        elif what == "retype":
            tensors[name] = tensor.to(dtype)
        elif tensor.numel() and tensor.dtype != torch.bool:
            of_floats = tensor.is_floating_point()
            value: Any = number if of_floats else int(at * 2654435761 % (1 << 33)) - (1 << 32)
            if not of_floats:
                limits = torch.iinfo(tensor.dtype)
                value = max(limits.min, min(limits.max, value))
            flat = tensor.float().flatten() if of_floats else tensor.flatten().clone()
            flat[slice(None) if what == "fill" else at % len(flat)] = value
            tensors[name] = flat.to(tensor.dtype).reshape(tensor.shape)

    return happen


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from([*KINDS]),
    damages=st.lists(damage(), min_size=1, max_size=2),
    said=st.one_of(
        st.none(), st.tuples(st.sampled_from(["group", "block"]), st.sampled_from(HUGE))
    ),
)
def test_any_damage_is_read_as_it_is_or_refused_in_a_line(
    kind: str, damages: list[Callable[[Tensors], None]], said: tuple[str, int] | None
) -> None:
    found, make = KINDS[kind]
    tensors = make(np.random.default_rng(2))
    for each in damages:
        each(tensors)
        if not tensors:
            return
    if said is not None:
        name, number = said
        block = (number, number) if name == "block" else found.block
        group = number if name == "group" else found.group
        found = Quantised(found.method, found.bits, group, found.act_order, found.form, block)
    try:
        weight = read_weight(found, tensors, SHAPE)
    except Unreadable as error:
        said_of_it = str(error)
    else:
        said_of_it = ""
    if said_of_it:
        assert re.fullmatch(".{1,200}", said_of_it)
        return
    values = in_float32(weight)
    assert values.shape == SHAPE
    assert np.isfinite(values).all()
    whole = KINDS[kind][1](np.random.default_rng(2))
    same = tensors.keys() == whole.keys() and all(
        tensors[name].shape == whole[name].shape for name in whole
    )
    if said is None and same:
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(values, meant(kind, tensors), rtol=8e-3, atol=1e-3)


def test_a_block_that_is_larger_than_any_memory_takes_none() -> None:
    tensors = _float8(np.random.default_rng(2))
    tensors["weight_scale_inv"] = torch.full((1, 2), 0.01)
    weight = read_weight(Quantised("fp8", block=(1 << 40, 32)), tensors, SHAPE)
    np.testing.assert_allclose(
        in_float32(weight), (tensors["weight"].float() * 0.01).bfloat16().float().numpy()
    )


def test_a_scale_of_zero_makes_zeros() -> None:
    tensors = _gptq(np.random.default_rng(2))
    tensors["scales"][1] = 0
    values = in_float32(read_weight(KINDS["gptq"][0], tensors, SHAPE))
    assert (values[:, tensors["g_idx"].numpy() == 1] == 0).all()
    assert (values[:, tensors["g_idx"].numpy() != 1] != 0).any()
