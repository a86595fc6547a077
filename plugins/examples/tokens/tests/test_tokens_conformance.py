"""The tokenizer in another package's recipe, held to what every recipe promises."""

from __future__ import annotations

from llmserve.testing import RecipeConformance


class TestTokens(RecipeConformance):
    recipe = "hf"
    options = {"tokenizer": "tokenizers"}
