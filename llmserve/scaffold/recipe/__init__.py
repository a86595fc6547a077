"""The plugin ``scaffold``: a recipe over what other plugins bring."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.plugin import Recipe, hookimpl


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    """Register what ``llmserve build --plugin scaffold`` selects."""
    return [
        Recipe(
            name="scaffold",
            summary="Hugging Face models, streaming, sixteen at a time",
            generator="transformers",
            defaults={"decoupled": True, "max_batch_size": 16},
        )
    ]
