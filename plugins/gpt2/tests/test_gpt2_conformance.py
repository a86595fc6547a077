"""The plugin held to what every recipe promises, in both formats and with both strategies."""

from __future__ import annotations

from llmserve.testing import RecipeConformance


class TestOnnxDirect(RecipeConformance):
    recipe = "gpt2-onnx"


class TestTorchScriptOldest(RecipeConformance):
    recipe = "gpt2-torchscript"
    options = {"batching": "sequence-oldest"}
