"""The plugin ``jsonout``: answers as JSON documents, and models that can write nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmserve import hookimpl
from llmserve.placement import PLACEMENT_OPTIONS
from llmserve.roles import Formatter, Generator, Recipe, Tensor
from llmserve.runtime import contract

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext

JSON_OUTPUT = Tensor("json_output", "TYPE_STRING", optional=False)
RESPONSE_FORMAT = Tensor("response_format", "TYPE_STRING")


@hookimpl
def llmserve_register_formatters() -> Sequence[Formatter]:
    """Register the formatter; any recipe can have it, by ``--format json``."""
    return [
        Formatter(
            name="json",
            summary="The text as ever, and beside it json_output: a document with tool calls",
            runtime="llmserve_jsonout.formatter:JsonFormatter",
            inputs=contract.TEXT_FORMAT_INPUTS,
            outputs=(
                contract.TEXT_OUTPUT,
                contract.FINISH_REASON,
                *contract.USAGE,
                JSON_OUTPUT,
            ),
        )
    ]


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    """Register the generator that keeps an answer to JSON when its request asks for that."""
    return [
        Generator(
            name="json-transformers",
            summary="transformers' generate(), held to JSON by response_format=json_object",
            runtime="llmserve_jsonout.generator:JsonGenerator",
            prepare=_prepare,
            # A name that is not the contract's reaches the runtime in Params.extra.
            inputs=(*contract.SAMPLING, RESPONSE_FORMAT),
            options=PLACEMENT_OPTIONS,
            requires=("accelerate", "torch", "transformers"),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    """Register what ``build --plugin jsonout`` selects."""
    return [
        Recipe(
            name="jsonout",
            summary="Hugging Face models whose answers are JSON where a request asks for it",
            tokenizer="transformers",
            generator="json-transformers",
            batching="dynamic",
            formatter="json",
        )
    ]


def _prepare(context: BuildContext) -> Mapping[str, Any]:
    from llmserve.builder.causal import place_causal_model

    return place_causal_model(context)
