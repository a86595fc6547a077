"""The plugin ``scaffold``: a stepping generator, and its recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.plugin import (
    PLACEMENT_OPTIONS,
    BuildContext,
    Generator,
    Recipe,
    hookimpl,
    place_causal_model,
)
from llmserve.runtime.contract import LOGPROBS, LOGPROBS_OUTPUTS, SAMPLING


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    """Register the generator; its class is imported in Triton, not here."""
    return [
        Generator(
            name="scaffold",
            summary="A decoding loop over a transformers model that requests can join",
            runtime="llmserve.scaffold.stepper.generator:ScaffoldGenerator",
            # With "batch" it also runs with the batchings dynamic and static.
            modes=frozenset({"step", "batch"}),
            prepare=_prepare,
            inputs=(*SAMPLING, *LOGPROBS),
            outputs=LOGPROBS_OUTPUTS,
            # The Sampler chooses every token, and it applies the formatter's constraints.
            constrains=True,
            options=PLACEMENT_OPTIONS,
            requires=("accelerate", "torch", "transformers"),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(
            name="scaffold",
            summary="Hugging Face models run in steps by scaffold",
            generator="scaffold",
            batching="continuous",
        )
    ]


def _prepare(context: BuildContext) -> Mapping[str, Any]:
    """Put the weights where the generator finds them; this runs where the model is built."""
    return place_causal_model(context)
