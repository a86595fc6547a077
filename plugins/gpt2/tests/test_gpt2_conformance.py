"""The plugin held to what every recipe promises, in both formats and with both strategies."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.testing import RecipeConformance


class _OfASmallModel(RecipeConformance):
    @pytest.fixture(autouse=True)
    def _small(self, small: Path) -> None:
        type(self).model = str(small)


class TestOnnxDirect(_OfASmallModel):
    recipe = "gpt2-onnx"


class TestTorchScriptOldest(_OfASmallModel):
    recipe = "gpt2-torchscript"
    options = {"batching": "sequence-oldest"}
