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
            summary="What waits together runs shortest first, a few at a time",
            runtime="llmserve.scaffold.batching.driver:ScaffoldDriver",
            prepare=_prepare,
            options=(
                Option("max_batch_size", 16, "Most prompts that Triton hands over.", minimum=1),
                Option("width", 4, "Most requests that run together.", minimum=1),
                Option("decoupled", False, "Send pieces as they are made."),
            ),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(
            name="scaffold",
            summary="Hugging Face models batched by scaffold",
            generator="transformers",
            batching="scaffold",
        )
    ]


def _prepare(context: BuildContext) -> Mapping[str, Any]:
    """Say in Triton's configuration how requests come together, on the machine that builds."""
    context.config.dynamic_batching.max_queue_delay_microseconds = 0
    if context.options["decoupled"]:
        context.streams()
    return {"width": context.options["width"]}
