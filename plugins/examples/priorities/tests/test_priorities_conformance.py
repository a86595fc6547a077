"""The strategy in another package's recipe, held to what every recipe promises."""

from __future__ import annotations

from llmserve.testing import RecipeConformance


class TestPriorities(RecipeConformance):
    recipe = "hf"
    options = {"batching": "priorities"}
