"""The faster modules, compared with the originals."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from llmserve.runtime.torch.linear import FewRowsLinear, speed_up


@pytest.mark.parametrize("rows", [1, 2, 5, 32, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (70, 6), (300, 130), (16, 2), (256, 64)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_equals_that_of_pytorch(
    rows: int, outputs: int, inputs: int, biased: bool
) -> None:
    torch.manual_seed(outputs)
    plain = torch.nn.Linear(inputs, outputs, bias=biased).requires_grad_(False)
    x = torch.randn(1, rows, inputs)
    fast = FewRowsLinear(plain.weight.detach(), plain.bias)
    torch.testing.assert_close(fast(x), plain(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", [Conv1D(40, 24), ACT2FN["gelu_new"]], ids=str)
def test_a_faster_module_gives_the_same_result(module: torch.nn.Module, dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(module).to(dtype).requires_grad_(False)
    x = torch.linspace(-4, 4, 72).view(3, 24).to(dtype)
    expected = model(x)
    speed_up(model)
    assert model[0] is not module
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(model(x), expected, atol=tolerance, rtol=tolerance)
