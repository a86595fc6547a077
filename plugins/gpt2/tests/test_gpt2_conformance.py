"""The plugin held to what every recipe promises, in both formats and with both strategies."""

from __future__ import annotations

import pytest

from llmserve.testing import RecipeConformance

from .small_model import small_model


class _OfASmallModel(RecipeConformance):
    @pytest.fixture(autouse=True)
    def _small(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        type(self).model = str(small_model(tmp_path_factory))


class TestOnnxDirect(_OfASmallModel):
    recipe = "gpt2-onnx"


class TestTorchScriptOldest(_OfASmallModel):
    recipe = "gpt2-torchscript"
    options = {"batching": "sequence-oldest"}
