"""The conformance suite of recipes, for the plugin's defaults and other options."""

from __future__ import annotations

from typing import Any, ClassVar

from llmserve.testing import ConstrainedConformance, RecipeConformance


class TestHf(ConstrainedConformance):
    recipe = "hf"
    constrained: ClassVar[dict[str, Any]] = {"choice": ["red", "green (light)"]}

    def fits(self, text: str) -> bool:
        return text in ("red", "green (light)")


class TestHfInOnePiece(RecipeConformance):
    recipe = "hf"
    options = {"decoupled": False}


class TestHfUnbatched(RecipeConformance):
    """The options of Persimmon in the tutorial: single prompts, repeated in the answer."""

    recipe = "hf"
    options = {"max_batch_size": 0, "echo": True}
