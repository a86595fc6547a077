"""The plugin ``scaffold``: a batching strategy, and its recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.plugin import Batching, BuildContext, Option, Recipe, hookimpl


@hookimpl
def llmserve_register_batchings() -> Sequence[Batching]:
    """Register the strategy; its class is imported in Triton, not here."""
    return [
        Batching(
            name="scaffold",
            summary="Runs waiting requests shortest first, a few at once",
            runtime="llmserve.scaffold.batching.driver:ScaffoldDriver",
            prepare=_prepare,
            options=(
                Option("max_batch_size", 16, "Maximum prompts per batch.", minimum=1),
                Option("width", 4, "Maximum requests that run together.", minimum=1),
                Option("decoupled", False, "Stream pieces as they are generated."),
            ),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(
            name="scaffold",
            summary="Hugging Face models with the batching scaffold",
            generator="transformers",
            batching="scaffold",
        )
    ]


def _prepare(context: BuildContext) -> Mapping[str, Any]:
    """Configure Triton's scheduler; this runs where the model is built."""
    context.config.dynamic_batching.max_queue_delay_microseconds = 0
    if context.options["decoupled"]:
        context.streams()
    return {"width": context.options["width"]}
