"""The plugin ``jsonout``: answers as JSON documents, and models that can write nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.plugin import Formatter, Recipe, Tensor, hookimpl

JSON_OUTPUT = Tensor("json_output", "TYPE_STRING", optional=False)
RESPONSE_FORMAT = Tensor("response_format", "TYPE_STRING")


@hookimpl
def llmserve_register_formatters() -> Sequence[Formatter]:
    """Register the formatter; any recipe can have it, by ``--format json``."""
    return [
        Formatter(
            name="json",
            summary="The text, beside it a document with tool calls; held to JSON if asked to be",
            runtime="llmserve_jsonout.formatter:JsonFormatter",
            # A name that is not the contract's reaches the runtime in Params.extra.
            extra_inputs=(RESPONSE_FORMAT,),
            extra_outputs=(JSON_OUTPUT,),
            requires=("numpy",),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    """Register what ``build --plugin jsonout`` selects."""
    return [
        Recipe(
            name="jsonout",
            summary="Hugging Face models whose answers are JSON where a request asks for it",
            generator="stepwise",
            batching="iterative",
            formatter="json",
        )
    ]
