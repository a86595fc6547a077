"""The plugin ``openvino``: language models on OpenVINO GenAI, for machines without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.plugin import (
    DTYPE_OPTION,
    BuildContext,
    Generator,
    Option,
    Pair,
    Recipe,
    contract,
    hookimpl,
)

# OpenVINO cannot forbid words, so the model does not take them: who sends some is refused.
_SAMPLING = tuple(tensor for tensor in contract.SAMPLING if tensor.name != "bad_words")


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    """Register the engine: it can be stepped by any driver, or run whole batches."""
    return [
        Generator(
            name="openvino",
            summary="OpenVINO GenAI with its paged cache, for CPUs",
            runtime="llmserve_openvino.engine:OpenVinoGenerator",
            modes=frozenset({"step", "batch"}),
            weights=("*.safetensors", "openvino_model.xml", "openvino_model.bin"),
            prepare=_prepare_generator,
            inputs=_SAMPLING,
            options=(
                DTYPE_OPTION,
                Option("device", "auto", "Where it runs: the CPU.", choices=("auto", "cpu")),
                Option(
                    "weight_format",
                    "fp32",
                    "How weights are kept when a model is converted.",
                    choices=("fp32", "fp16", "bf16", "int8", "int4"),
                ),
                Option(
                    "int4_group",
                    128,
                    "So many int4 weights share a scale; -1 is a scale for each output.",
                    minimum=-1,
                ),
                Option(
                    "int4_ratio",
                    1.0,
                    "Which part of the layers is int4; the others are int8.",
                    minimum=0,
                    maximum=1,
                ),
                Option(
                    "kv_cache",
                    "auto",
                    "Type of the cache; auto is what is computed in, so that nothing is rounded.",
                    choices=("auto", "f32", "bf16", "f16", "u8"),
                ),
                Option(
                    "dynamic_quantization",
                    128,
                    "With int8 or int4 weights, so many activations share a scale; 0 keeps them "
                    "as they are.",
                    minimum=0,
                ),
                Option(
                    "cache_gb",
                    0,
                    "Memory of the cache in GB; 0 lets it grow as requests need it.",
                    minimum=0,
                ),
                Option(
                    "max_sequences",
                    64,
                    "Most sequences under way at a time; others wait.",
                    minimum=1,
                ),
                Option("prefix_cache", True, "Keep what prompts that begin alike have in common."),
                Option(
                    "prompt_lookup",
                    0,
                    "Most tokens that a step takes from the prompt and checks, where an answer "
                    "repeats what stands there; 0 is none.",
                    minimum=0,
                    maximum=64,
                ),
                Option(
                    "draft_model",
                    "",
                    "A smaller model with the same tokens, in a folder or on the hub: it guesses, "
                    "and this one checks several guesses in a step. Answers are greedy then.",
                ),
                Option(
                    "draft_tokens",
                    4,
                    "Most tokens that the draft model guesses in a step.",
                    minimum=1,
                    maximum=64,
                ),
                Option("threads", 0, "Threads that compute; 0 is one per core.", minimum=0),
            ),
            requires=("openvino-genai",),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    """Register what ``build --plugin openvino`` selects."""
    return [
        Recipe(
            name="openvino",
            summary="Models on a CPU, by OpenVINO GenAI",
            tokenizer="transformers",
            generator="openvino",
            batching="continuous",
            suits={"cpu": 20},
            pairs=(
                Pair(
                    "openvino-static-inflight",
                    "static=openvino:batching=static,max_batch_size=8",
                    "inflight=openvino:max_batch_size=64",
                ),
            ),
        )
    ]


def _prepare_generator(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_openvino.prepare import prepare

    return prepare(context)
