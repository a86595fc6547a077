"""The kernels in C against the same sums written out, and the engine without them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llmserve_iterative.engine import Engine, native, runner
from llmserve_iterative.engine.arena import Extent
from llmserve_iterative.engine.kernels import Kernels, make_kernels
from llmserve_iterative.engine.product import ProductLinear, make_product
from llmserve_iterative.engine.store import Places, Store

from .families import PlainTokenizer, finish, generation, make_model, same_as_alone

PLACES = 96
CPU = torch.device("cpu")
EXTENTS = [Extent(0, 32), Extent(32, 16), Extent(48, 48)]
POSITIONS = [20, 0, 40]


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    """What threads do to one another shows only where there are some, whatever is set outside."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def kernels_of(dtype: torch.dtype) -> Kernels:
    kernels = make_kernels(dtype, CPU, PLACES)
    if kernels is None:
        pytest.skip("no C compiler, or an OpenMP that is not GNU's")
    return kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 24, 64, 80])
@pytest.mark.parametrize(("group", "window", "softcap"), [(1, None, None), (3, 7, None), (2, 7, 5)])
def test_attention_is_the_sum_that_it_should_be(
    dtype: torch.dtype, width: int, group: int, window: int | None, softcap: float | None
) -> None:
    torch.manual_seed(width)
    kernels, heads = kernels_of(dtype), 2
    layer = torch.randn(2, PLACES * heads, width).to(dtype)
    # As transformers has it: a view whose heads lie side by side for each token.
    query = torch.randn(len(EXTENTS), heads * group, width).to(dtype).transpose(0, 1)
    table = Places(EXTENTS, POSITIONS, CPU).table
    seen = kernels.attend(query, layer[0], layer[1], table, window, 0.3, softcap)
    for token, (extent, position) in enumerate(zip(EXTENTS, POSITIONS, strict=True)):
        for head in range(heads * group):
            start = extent.start * heads + extent.size * (head // group)
            first = max(0, position + 1 - (window or PLACES))
            keys, values = layer[:, start + first : start + position + 1].float()
            scores = keys @ query[head, token].float() * 0.3
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            expected = scores.softmax(0) @ values
            near = 2e-6 if dtype == torch.float32 else 0.02
            torch.testing.assert_close(seen[token, head].float(), expected, atol=near, rtol=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writing_is_what_the_store_does_without_kernels(dtype: torch.dtype) -> None:
    places = Places(EXTENTS, POSITIONS, CPU)
    new = torch.randn(2, len(EXTENTS), 5, 8).to(dtype).transpose(1, 2)
    layers = [
        Store(PLACES, dtype, kernels).write(0, places, *new)
        for kernels in (kernels_of(dtype), None)
    ]
    for one, other in zip(*layers, strict=True):
        assert torch.equal(one, other)
        assert one.count_nonzero() == 3 * 5 * 8


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen2"])
def test_without_a_compiler(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(runner, "make_kernels", lambda *_: _none_without_compiler())
    engine = Engine(make_model(family), PlainTokenizer(), max_sequences=3, cache_tokens=512)
    several = [generation(range(3, 3 + n), 20) for n in (1, 7, 19)]
    for one in several:
        engine.admit(one)
        engine.step()
    finish(engine)
    assert engine.way == "flat"
    assert all(same_as_alone(family, one) for one in several)


def _none_without_compiler() -> None:
    assert make_kernels(torch.float32, CPU, PLACES) is None


def test_a_source_that_does_not_compile_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels_of(torch.float32)
    broken = tmp_path / "broken.c"
    broken.write_text("this is not C")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(subprocess.CalledProcessError):
        native._compiled([broken])
    assert not list((tmp_path / "llmserve" / "iterative").iterdir())


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 8, 13, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (70, 6), (97, 130), (16, 2)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_is_what_pytorch_makes(
    rows: int, outputs: int, inputs: int, biased: bool
) -> None:
    product = make_product(torch.bfloat16, CPU)
    if product is None:
        pytest.skip("a processor that does not multiply pairs of bfloat16, or has tiles")
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs).bfloat16()
    bias = torch.randn(outputs).bfloat16() if biased else None
    x = torch.randn(1, rows, inputs).bfloat16()
    made = ProductLinear(product, weight, bias)(x)
    expected = torch.nn.functional.linear(
        x.float(), weight.float(), None if bias is None else bias.float()
    )
    assert made.shape == (1, rows, outputs)
    torch.testing.assert_close(made.float(), expected, atol=0.05, rtol=0.01)
