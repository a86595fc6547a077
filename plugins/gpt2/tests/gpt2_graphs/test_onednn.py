"""Products by oneDNN in a loaded graph: those it can make, exactly as they were, and no others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from llmserve.server.backends.pytorch import onednn

JIT: Any = torch.jit
MADE = "mkldnn::_linear_pointwise"


class Layers(torch.nn.Module):
    """Weights both ways round, with a bias and without one, and rows in a batch of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.across = torch.nn.Parameter(torch.randn(24, 40))
        self.bias = torch.nn.Parameter(torch.randn(40))
        self.along = torch.nn.Linear(40, 16)
        self.bare = torch.nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.addmm(self.bias, x.view(-1, 24), self.across)
        along: torch.Tensor = self.along(rows.view(x.shape[0], x.shape[1], 40))
        bare: torch.Tensor = self.bare(along[:, -1:])
        return bare


class Others(torch.nn.Module):
    """Factors, another type, and weights that come with the request."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 6))
        self.wide = torch.nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = torch.addmm(x[:6], x, self.weight, beta=2)
        doubled: torch.Tensor = self.wide(scaled.double())
        return torch.nn.functional.linear(doubled.float(), x)


def loaded(tmp_path: Path, module: torch.nn.Module, example: torch.Tensor) -> Any:
    """Return a module as the stand-in has it: traced, frozen, written and read."""
    torch.manual_seed(0)
    with torch.no_grad():
        traced = JIT.freeze(JIT.trace(module.eval(), example, check_trace=False))
    traced.save(str(tmp_path / "model.pt"))
    return JIT.load(str(tmp_path / "model.pt"))


def kinds(module: Any) -> Counter[str]:
    return Counter(node.kind() for node in module.graph.nodes())


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
@pytest.mark.parametrize("length", [1, 5])
def test_what_onednn_makes_is_what_it_was(tmp_path: Path, rows: int, length: int) -> None:
    module = Layers()
    changed = loaded(tmp_path, module, torch.randn(2, 3, 24))
    assert onednn.use(changed) == 3
    found = kinds(changed)
    assert (found[MADE], found["aten::addmm"], found["aten::linear"]) == (3, 0, 0)
    x = torch.randn(rows, length, 24)
    # As often as the engine needs to have looked at the graph and compiled it.
    for _ in range(3):
        with torch.inference_mode():
            torch.testing.assert_close(changed(x), module(x))


def test_other_products_stay_as_they_are(tmp_path: Path) -> None:
    module = Others()
    changed = loaded(tmp_path, module, torch.randn(6, 6))
    before = kinds(changed)
    assert onednn.use(changed) == 0
    assert kinds(changed) == before
    x = torch.randn(6, 6)
    torch.testing.assert_close(changed(x), module(x))


def test_without_onednn_all_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = loaded(tmp_path, Layers(), torch.randn(2, 3, 24))
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert onednn.use(changed) == 0
    assert kinds(changed)[MADE] == 0
