"""The conformance suite of recipes, for the tokenizer in another package's recipe."""

from __future__ import annotations

from llmserve.testing import RecipeConformance


class TestTokens(RecipeConformance):
    recipe = "hf"
    options = {"tokenizer": "tokenizers"}
