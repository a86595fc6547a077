"""Attention over pages, and the quicker modules, against the same sums written out."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from llmserve_iterative.engine.attention import FlashPlan, PagePlan, Rule
from llmserve_iterative.engine.linear import FewRowsLinear, speed_up
from llmserve_iterative.engine.scheduler import Chunk, detached_sequence

CPU = torch.device("cpu")
SIZE = 4
HEADS = 2


def chunk(pages: list[int], start: int, stop: int) -> Chunk:
    return Chunk(detached_sequence([1] * stop, pages), start, stop)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for plan in (PagePlan, FlashPlan):
        monkeypatch.setattr(plan, "page_size", SIZE)


# Pages in any order, neighbours and not, one of them shared by two; single tokens and pieces.
CHUNKS = [
    chunk([5], 2, 3),
    chunk([3, 4, 0], 9, 10),
    chunk([3, 7], 6, 7),
    chunk([8, 2, 6], 3, 11),
    chunk([9], 0, 4),
]


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("singles_alone", [True, False])
def test_attention_is_the_sum_that_it_should_be(
    group: int, window: int | None, softcap: float | None, singles_alone: bool
) -> None:
    torch.manual_seed(0)
    chunks = CHUNKS[:3] if singles_alone else CHUNKS
    plan = PagePlan(chunks, CPU)
    keys, values = torch.randn(10, SIZE, HEADS, 8), torch.randn(10, SIZE, HEADS, 6)
    query = torch.randn(HEADS * group, len(plan.tokens.ids), 8)
    seen = plan.attend(query, keys.flatten(0, 1), values.flatten(0, 1), Rule(0.3, window, softcap))
    rows = ((one, at) for one in chunks for at in range(one.start, one.stop))
    for row, (one, at) in enumerate(rows):
        first = max(0, at + 1 - (window or 99))
        for head in range(HEADS * group):
            own = [whole[one.pages].flatten(0, 1)[:, head // group] for whole in (keys, values)]
            scores = own[0][first : at + 1] @ query[head, row] * 0.3
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            expected = scores.softmax(0) @ own[1][first : at + 1]
            torch.testing.assert_close(seen[row, head], expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("rows", [1, 2, 5, 32, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (70, 6), (97, 130), (16, 2), (256, 64)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_is_what_pytorch_makes(
    rows: int, outputs: int, inputs: int, biased: bool
) -> None:
    torch.manual_seed(outputs)
    plain = torch.nn.Linear(inputs, outputs, bias=biased).requires_grad_(False)
    x = torch.randn(1, rows, inputs)
    quick = FewRowsLinear(plain.weight.detach(), plain.bias)
    torch.testing.assert_close(quick(x), plain(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", [Conv1D(40, 24), ACT2FN["gelu_new"]], ids=str)
def test_a_quicker_module_makes_the_same(module: torch.nn.Module, dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(module).to(dtype).requires_grad_(False)
    x = torch.linspace(-4, 4, 72).view(3, 24).to(dtype)
    expected = model(x)
    speed_up(model)
    assert model[0] is not module
    near = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(model(x), expected, atol=near, rtol=near)
