"""The conformance suite for the recipe, on a real Triton."""

from __future__ import annotations

from llmserve.testing import RecipeConformance


class TestScaffold(RecipeConformance):
    recipe = "scaffold"
