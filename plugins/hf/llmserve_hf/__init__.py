"""The plugin ``hf``: any causal language model that transformers loads, in dynamic batches."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.plugin import (
    PLACEMENT_OPTIONS,
    Generator,
    Recipe,
    contract,
    hookimpl,
    place_causal_model,
)


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    return [
        Generator(
            name="transformers",
            summary="AutoModelForCausalLM and its generate(), on CPU or GPU",
            runtime="llmserve_hf.generator:TransformersGenerator",
            prepare=place_causal_model,
            inputs=(
                *contract.SAMPLING,
                contract.LOGIT_BIAS,
                *contract.LOGPROBS,
                contract.PROMPT_LOGPROBS,
            ),
            outputs=(*contract.LOGPROBS_OUTPUTS, contract.PROMPT_LOGPROBS_OUTPUT),
            constrains=True,
            options=PLACEMENT_OPTIONS,
            requires=("accelerate", "torch", "transformers"),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(
            name="hf",
            summary="Any causal language model, batched",
            tokenizer="transformers",
            generator="transformers",
            batching="dynamic",
            formatter="text",
            # Triton's /infer needs false.
            defaults={"decoupled": True},
        )
    ]
