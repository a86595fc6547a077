"""The conformance suite of recipes, for the plugin's defaults and other options."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from llmserve.testing import ConstrainedConformance, RecipeConformance


class TestHf(ConstrainedConformance):
    recipe = "hf"
    constrained: ClassVar[dict[str, Any]] = {"choice": ["red", "green (light)"]}

    def fits(self, text: str) -> bool:
        return text in ("red", "green (light)")


@pytest.mark.long
class TestHfUnbatched(RecipeConformance):
    """Whole answers to single prompts, which they repeat, as the tutorial's Persimmon."""

    recipe = "hf"
    options = {"max_batch_size": 0, "echo": True, "decoupled": False}
