"""The plugin ``openvino``: language models on OpenVINO GenAI, batched in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmserve import hookimpl
from llmserve.options import INT32_MAX
from llmserve.placement import DTYPE_OPTION
from llmserve.roles import Batching, Generator, Option, Recipe
from llmserve.runtime import contract

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext

# OpenVINO has no way to forbid words, so the model does not take the wish: it is refused, not
# ignored, for whoever sends it.
_SAMPLING = tuple(tensor for tensor in contract.SAMPLING if tensor.name != "bad_words")


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    """Register the engine: it can be stepped by any driver, or run whole batches."""
    return [
        Generator(
            name="openvino",
            summary="OpenVINO GenAI with its paged cache, for CPUs",
            runtime="llmserve_openvino.generator:OpenVinoGenerator",
            modes=frozenset({"step", "batch"}),
            weights=("*.safetensors", "openvino_model.xml", "openvino_model.bin"),
            prepare=_prepare_generator,
            inputs=_SAMPLING,
            options=(
                DTYPE_OPTION,
                Option(
                    "weight_format",
                    "fp32",
                    "How weights are kept when a model is converted.",
                    choices=("fp32", "fp16", "int8", "int4"),
                ),
                Option(
                    "kv_cache",
                    "auto",
                    "Type of the cache; auto is that of dtype, so that nothing is rounded unasked.",
                    choices=("auto", "f32", "bf16", "f16", "u8"),
                ),
                Option(
                    "cache_gb",
                    0,
                    "Memory of the cache in GB; 0 lets it grow as requests need it.",
                    minimum=0,
                    maximum=INT32_MAX,
                ),
                Option(
                    "max_sequences",
                    64,
                    "Most sequences under way at a time; others wait.",
                    minimum=1,
                    maximum=INT32_MAX,
                ),
                Option("prefix_cache", False, "Keep what prompts that begin alike have in common."),
                Option(
                    "threads",
                    0,
                    "Threads that compute; 0 is one per core.",
                    minimum=0,
                    maximum=INT32_MAX,
                ),
            ),
            requires=("openvino-genai",),
        )
    ]


@hookimpl
def llmserve_register_batchings() -> Sequence[Batching]:
    """Register batching by a thread of the model's own; it drives whatever can be stepped."""
    return [
        Batching(
            name="continuous",
            summary="A thread makes steps without pause; requests join between two of them",
            runtime="llmserve_openvino.driver:ContinuousDriver",
            mode="step",
            prepare=_prepare_batching,
            inputs=(contract.MAX_TOKENS, contract.STREAM, contract.STOP_WORDS),
            options=(
                Option(
                    "max_batch_size",
                    32,
                    "Most prompts in one request.",
                    minimum=1,
                    maximum=INT32_MAX,
                ),
            ),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    """Register what ``build --plugin openvino`` selects."""
    return [
        Recipe(
            name="openvino",
            summary="Language models on a CPU with OpenVINO GenAI, batched in flight, streaming",
            tokenizer="transformers",
            generator="openvino",
            batching="continuous",
            formatter="text",
        )
    ]


def _prepare_generator(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_openvino.prepare import prepare

    return prepare(context)


def _prepare_batching(context: BuildContext) -> Mapping[str, Any]:
    config = context.config
    # What waits together is handed over together; nothing waits for company.
    config.dynamic_batching.SetInParent()
    config.model_transaction_policy.decoupled = True
    context.exchange = "stream"
    return {}
