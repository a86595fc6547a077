"""The plugin ``scaffold``: a recipe over what other plugins bring."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve import hookimpl
from llmserve.roles import Recipe


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    """Register what ``llmserve build --plugin scaffold`` selects."""
    return [
        Recipe(
            name="scaffold",
            summary="Hugging Face models, streaming, sixteen at a time",
            tokenizer="transformers",
            generator="transformers",
            batching="dynamic",
            formatter="text",
            defaults={"decoupled": True, "max_batch_size": 16},
        )
    ]
