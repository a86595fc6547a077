"""The plugin held to what every recipe promises, as it comes and in one piece."""

from __future__ import annotations

from llmserve.testing import RecipeConformance


class TestHf(RecipeConformance):
    recipe = "hf"


class TestHfInOnePiece(RecipeConformance):
    recipe = "hf"
    options = {"decoupled": False}


class TestHfUnbatched(RecipeConformance):
    recipe = "hf"
    options = {"max_batch_size": 0}
