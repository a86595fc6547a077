"""The plugin ``scaffold``: a formatter, and its recipe."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.plugin import Formatter, Recipe, Tensor, hookimpl


@hookimpl
def llmserve_register_formatters() -> Sequence[Formatter]:
    """Register the formatter; its class is imported in Triton, not here."""
    return [
        Formatter(
            name="scaffold",
            summary="Adds every answer as a JSON object, in answer_json",
            runtime="llmserve.scaffold.formatter.formatter:ScaffoldFormatter",
            extra_outputs=(Tensor("answer_json", "TYPE_STRING", optional=False),),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(
            name="scaffold",
            summary="Hugging Face models with the formatter scaffold",
            generator="transformers",
            formatter="scaffold",
        )
    ]
