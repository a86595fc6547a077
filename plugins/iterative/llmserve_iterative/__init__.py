"""The plugin ``iterative``: token-by-token decoding on Triton's iterative scheduling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmserve import hookimpl
from llmserve.options import INT32_MAX
from llmserve.placement import PLACEMENT_OPTIONS
from llmserve.roles import Batching, Generator, Option, Recipe
from llmserve.runtime import contract

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext

_INPUTS = (contract.MAX_TOKENS, contract.STREAM, contract.STOP_WORDS)
_SLOTS = Option(
    "max_batch_size",
    32,
    "Most sequences under way at a time; others wait.",
    minimum=1,
    maximum=INT32_MAX,
)


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    """Register the engine: a cache of keys and values, and all sequences in one pass."""
    return [
        Generator(
            name="stepwise",
            summary="Any decoder-only transformers model, a token of every sequence at a time",
            runtime="llmserve_iterative.generator:StepwiseGenerator",
            modes=frozenset({"step", "batch"}),
            prepare=_prepare_generator,
            inputs=(*contract.SAMPLING, *contract.LOGPROBS),
            outputs=contract.LOGPROBS_OUTPUTS,
            constrains=True,
            options=(
                *PLACEMENT_OPTIONS,
                Option(
                    "cache_tokens",
                    0,
                    "Tokens that the cache holds for all sequences together; 0 is four contexts, "
                    "or a quarter of one for every sequence if that is more.",
                    minimum=0,
                    maximum=INT32_MAX,
                ),
                Option(
                    "prefill_chunk",
                    256,
                    "Most prompt tokens in one step, so that a long prompt does not stall others.",
                    minimum=1,
                    maximum=INT32_MAX,
                ),
            ),
            requires=("accelerate", "llmserve-iterative", "torch", "transformers"),
        )
    ]


@hookimpl
def llmserve_register_batchings() -> Sequence[Batching]:
    """Register in-flight batching; the static batching that it replaces is the core's."""
    return [
        Batching(
            name="iterative",
            summary="New requests join while others are under way, by iterative scheduling",
            runtime="llmserve_iterative.driver:IterativeDriver",
            mode="step",
            prepare=_prepare_iterative,
            inputs=_INPUTS,
            options=(
                _SLOTS,
                Option(
                    "slots",
                    "oldest",
                    "oldest fills a batch from all sequences, direct gives each its own place.",
                    choices=("oldest", "direct"),
                ),
                Option(
                    "idle_seconds",
                    0.0,
                    "How long Triton keeps the place of a sequence whose client has gone. Steps "
                    "that take nearly as long let nobody join. 0 is 300, and 10 with direct slots.",
                    minimum=0,
                    maximum=3600,
                ),
                Option(
                    "burst_ms",
                    8.0,
                    "How long steps follow one another before new requests can join; 0 makes "
                    "one step at a time and sends every piece by itself.",
                    minimum=0,
                    maximum=1000,
                ),
            ),
        ),
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    """Register what ``build --plugin iterative`` selects."""
    return [
        Recipe(
            name="iterative",
            summary="Any decoder-only transformers model, batched in flight, streaming",
            tokenizer="transformers",
            generator="stepwise",
            batching="iterative",
            formatter="text",
        )
    ]


def _prepare_generator(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_iterative.prepare import prepare_generator

    return prepare_generator(context)


def _prepare_iterative(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_iterative.prepare import prepare_iterative

    return prepare_iterative(context)
