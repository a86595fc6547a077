"""Runs the conformance suite for recipes, in both formats and with both kinds of batching."""

from __future__ import annotations

import pytest

from llmserve.testing import RecipeConformance
from llmserve.testing.one_layer import one_layer


class _SmallModelConformance(RecipeConformance):
    @pytest.fixture(autouse=True)
    def _small(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        type(self).model = str(one_layer(tmp_path_factory.getbasetemp() / "one-layer"))


class TestOnnxDirect(_SmallModelConformance):
    recipe = "gpt2-onnx"


class TestTorchScriptOldest(_SmallModelConformance):
    recipe = "gpt2-torchscript"
    # The same build as in the live tests, so that both use one model.
    options = {"batching": "sequence-oldest", "tokenizer": "tokenizers"}
