"""The conformance suite of recipes, for each of the plugin's batching strategies."""

from __future__ import annotations

from typing import Any, ClassVar

from llmserve.testing import ConstrainedConformance, RecipeConformance


class TestIterative(ConstrainedConformance):
    recipe = "iterative"
    constrained: ClassVar[dict[str, Any]] = {"choice": ["red", "green (light)"]}

    def fits(self, text: str) -> bool:
        return text in ("red", "green (light)")


class TestStatic(RecipeConformance):
    recipe = "iterative"
    options = {"batching": "static", "max_batch_size": 8}
