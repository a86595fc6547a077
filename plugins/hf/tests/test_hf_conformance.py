"""The plugin held to what every recipe promises, as it comes and streaming."""

from __future__ import annotations

from llmserve.testing import RecipeConformance


class TestHf(RecipeConformance):
    recipe = "hf"


class TestHfStreaming(RecipeConformance):
    recipe = "hf"
    options = {"decoupled": True}


class TestHfUnbatched(RecipeConformance):
    recipe = "hf"
    options = {"max_batch_size": 0}
