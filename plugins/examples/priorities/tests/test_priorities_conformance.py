"""The conformance suite of recipes, for the strategy in another package's recipe."""

from __future__ import annotations

from typing import Any, ClassVar

from llmserve.testing import RecipeConformance


class TestPriorities(RecipeConformance):
    recipe = "hf"
    # One after the other, because a batch has one: half of the prompts show the same.
    prompts = RecipeConformance.prompts[:4]
    # The same options as in the live tests, so that both use the same model.
    options: ClassVar[dict[str, Any]] = {
        "batching": "priorities",
        "max_batch_size": 1,
        "priority_levels": 4,
        "queues": "3:size=2;4:timeout_ms=20",
    }
