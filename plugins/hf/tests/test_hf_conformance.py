"""The plugin held to what every recipe promises, as it comes and in one piece."""

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
    """As the tutorial serves Persimmon: one prompt at a time, and the answer begins with it."""

    recipe = "hf"
    options = {"max_batch_size": 0, "echo": True}
