"""The plugin ``hf``: any causal language model that transformers loads, in dynamic batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmserve import hookimpl
from llmserve.placement import DEVICE_OPTION, INSTANCES_OPTION
from llmserve.roles import Generator, Option, Recipe
from llmserve.runtime.contract import SAMPLING

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
            inputs=SAMPLING,
            options=(
                Option(
                    "dtype",
                    "auto",
                    "Type of the weights in memory; auto is the checkpoint's own on a GPU and "
                    "float32 on a CPU.",
                    choices=("auto", "float32", "bfloat16", "float16"),
                ),
                DEVICE_OPTION,
                INSTANCES_OPTION,
            ),
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
    from llmserve_hf.prepare import prepare

    return prepare(context)
