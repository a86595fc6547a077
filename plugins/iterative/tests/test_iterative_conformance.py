"""The plugin held to what every recipe promises, in each of its ways of batching."""

from __future__ import annotations

from llmserve.testing import RecipeConformance


class TestIterative(RecipeConformance):
    recipe = "iterative"


class TestIterativeDirect(RecipeConformance):
    recipe = "iterative"
    options = {"slots": "direct", "max_batch_size": 8}


class TestStatic(RecipeConformance):
    recipe = "iterative"
    options = {"batching": "static", "max_batch_size": 8}


class TestContinuous(RecipeConformance):
    recipe = "iterative"
    options = {"batching": "continuous", "max_batch_size": 8}
