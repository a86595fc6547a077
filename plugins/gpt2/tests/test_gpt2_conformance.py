"""The plugin held to what every recipe promises, in both formats and with both strategies."""

from __future__ import annotations

import pytest

from llmserve.testing import RecipeConformance
from tests.support import one_layer


class _OfASmallModel(RecipeConformance):
    @pytest.fixture(autouse=True)
    def _small(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        type(self).model = str(one_layer(tmp_path_factory.getbasetemp() / "one-layer"))


class TestOnnxDirect(_OfASmallModel):
    recipe = "gpt2-onnx"


class TestTorchScriptOldest(_OfASmallModel):
    recipe = "gpt2-torchscript"
    # As the live tests build it, so that both have the same model.
    options = {"batching": "sequence-oldest", "tokenizer": "tokenizers"}
