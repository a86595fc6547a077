"""The recipe served by a real Triton and held to what every recipe promises."""

from __future__ import annotations

from llmserve.testing import RecipeConformance


class TestScaffold(RecipeConformance):
    recipe = "scaffold"
