"""The strategy in another package's recipe, held to what every recipe promises."""

from __future__ import annotations

from typing import Any, ClassVar

from llmserve.testing import RecipeConformance


class TestPriorities(RecipeConformance):
    recipe = "hf"
    # As the live tests build it, so that both have the same model.
    options: ClassVar[dict[str, Any]] = {
        "batching": "priorities",
        "max_batch_size": 1,
        "priority_levels": 4,
        "queues": "3:size=2;4:timeout_ms=20",
    }
