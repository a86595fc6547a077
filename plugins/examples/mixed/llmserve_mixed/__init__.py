"""The plugin ``mixed``: only a recipe, whose parts come from other packages."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.plugin import Recipe, hookimpl


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(
            name="mixed",
            summary="The engine of iterative, another tokenizer",
            tokenizer="tokenizers",
            generator="stepwise",
            batching="iterative",
            # Defaults for the parts' options; --set overrides them.
            defaults={"max_batch_size": 16, "stream": True},
        )
    ]
