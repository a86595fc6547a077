"""The plugin ``mixed``: a recipe and nothing else; its parts come from other packages."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.plugin import Recipe, hookimpl


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    """Register what ``build --plugin mixed`` selects."""
    return [
        Recipe(
            name="mixed",
            summary="The engine of iterative, another tokenizer",
            tokenizer="tokenizers",
            generator="stepwise",
            batching="iterative",
            # Defaults of options that the parts bring; --set still has the last word.
            defaults={"max_batch_size": 16, "stream": True},
        )
    ]
