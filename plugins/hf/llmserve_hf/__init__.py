"""The plugin ``hf``: any model that answers with text, with transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.plugin import (
    ADAPTER_OPTIONS,
    IMAGE_OPTIONS,
    PLACEMENT_OPTIONS,
    BuildContext,
    Generator,
    ModelSize,
    Needs,
    OptionError,
    Recipe,
    Value,
    contract,
    hookimpl,
    is_for_text,
    lacks_adapter,
    place_adapters,
    place_causal_model,
    place_needs,
    place_seeing_model,
    sees_images,
)
from llmserve_hf.layout import LAYOUT_OPTION, apply_layout

_RUNTIME = "llmserve_hf.generator:TransformersGenerator"


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    return [
        Generator(
            name="transformers",
            summary="AutoModelForCausalLM and its generate(), on CPU or GPU",
            runtime=_RUNTIME,
            prepare=_prepare_generator,
            needs=_needs,
            inputs=(
                *contract.SAMPLING,
                contract.LOGIT_BIAS,
                *contract.LOGPROBS,
                contract.PROMPT_LOGPROBS,
                contract.ADAPTER,
            ),
            outputs=(*contract.LOGPROBS_OUTPUTS, contract.PROMPT_LOGPROBS_OUTPUT),
            constrains=True,
            options=(*PLACEMENT_OPTIONS, LAYOUT_OPTION, *ADAPTER_OPTIONS, *IMAGE_OPTIONS),
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
            # Slower than the others, and for what they cannot compute.
            suits={"cpu": 1, "cuda": 1},
        )
    ]


def _prepare_generator(context: BuildContext) -> Mapping[str, Any]:
    sees = sees_images(context.source, causal=True) and not is_for_text(context)
    if sees and not lacks_adapter(context):
        settings = _place_seeing(context)
    else:
        settings = place_causal_model(context)
        place_adapters(context, _RUNTIME, settings)
    apply_layout(context.config, str(context.options["layout"]))
    return {**settings, "adapter_mb": context.options["adapter_mb"]}


def _place_seeing(context: BuildContext) -> dict[str, Any]:
    if context.options["layout"] != "llmserve":
        raise OptionError(
            f"{context.source.asked} reads images, which goes with no layout yet",
            hint="leave out layout",
        )
    return place_seeing_model(context, runtime=_RUNTIME)


def _needs(size: ModelSize, options: Mapping[str, Value]) -> Needs:
    return place_needs(size, options, tokens=size.context, drops=True)
