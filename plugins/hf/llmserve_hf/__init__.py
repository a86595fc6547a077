"""The plugin ``hf``: any causal language model that transformers loads, in dynamic batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmserve import hookimpl
from llmserve.placement import PLACEMENT_OPTIONS
from llmserve.roles import Generator, Recipe
from llmserve.runtime.contract import LOGPROBS, LOGPROBS_OUTPUTS, SAMPLING

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    """Register transformers' own ``generate``."""
    return [
        Generator(
            name="transformers",
            summary="AutoModelForCausalLM and its generate(), on CPU or GPU",
            runtime="llmserve_hf.generator:TransformersGenerator",
            prepare=_prepare,
            inputs=(*SAMPLING, *LOGPROBS),
            outputs=LOGPROBS_OUTPUTS,
            constrains=True,
            options=PLACEMENT_OPTIONS,
            requires=("accelerate", "torch", "transformers"),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    """Register what ``build --plugin hf`` selects."""
    return [
        Recipe(
            name="hf",
            summary="Any Hugging Face causal language model, dynamically batched",
            tokenizer="transformers",
            generator="transformers",
            batching="dynamic",
            formatter="text",
        )
    ]


def _prepare(context: BuildContext) -> Mapping[str, Any]:
    from llmserve.builder.causal import place_causal_model

    return place_causal_model(context)
