"""The plugin ``scaffold``: a recipe of other plugins' components."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.plugin import Recipe, hookimpl


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    """Register the recipe for ``llmserve build --plugin scaffold``."""
    return [
        Recipe(
            name="scaffold",
            summary="Hugging Face models, streaming, in batches of sixteen",
            generator="transformers",
            defaults={"decoupled": True, "max_batch_size": 16},
        )
    ]
