"""The plugin ``scaffold``: a formatter, and its recipe."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve import hookimpl
from llmserve.roles import Formatter, Recipe, Tensor
from llmserve.runtime import contract


@hookimpl
def llmserve_register_formatters() -> Sequence[Formatter]:
    """Register the formatter; its class is imported in Triton, not here."""
    return [
        Formatter(
            name="scaffold",
            summary="Every answer as a JSON object too, in answer_json",
            runtime="llmserve.scaffold.formatter.formatter:ScaffoldFormatter",
            inputs=contract.TEXT_FORMAT_INPUTS,
            outputs=(
                contract.TEXT_OUTPUT,
                contract.FINISH_REASON,
                *contract.USAGE,
                Tensor("answer_json", "TYPE_STRING", optional=False),
            ),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    """Register what ``llmserve build --plugin scaffold`` selects."""
    return [
        Recipe(
            name="scaffold",
            summary="Hugging Face models with answers by scaffold",
            tokenizer="transformers",
            generator="transformers",
            batching="dynamic",
            formatter="scaffold",
        )
    ]
