"""The plugin ``openvino``: language models on OpenVINO, for machines without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Before any module of this package imports OpenVINO itself.
import llmserve.graphs  # noqa: F401
from llmserve.plugin import (
    ADAPTER_OPTIONS,
    DTYPE_OPTION,
    GUESS_OPTIONS,
    IMAGE_OPTIONS,
    STATE_OPTIONS,
    BuildContext,
    Generator,
    ModelSize,
    Needs,
    Option,
    Quantised,
    Recipe,
    Treatment,
    Value,
    contract,
    hookimpl,
)

RUNTIME = "llmserve_openvino.engine:OpenVinoGenerator"
"""Of the generator."""


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    return [
        Generator(
            name="openvino",
            summary="OpenVINO with paged attention, for CPUs",
            runtime=RUNTIME,
            modes=frozenset({"step", "batch"}),
            weights=("*.safetensors", "openvino_model.xml", "openvino_model.bin"),
            prepare=_prepare_generator,
            needs=_needs,
            keeps_gguf=lambda options: options["weight_format"] == "auto",
            quantised=_treatment,
            inputs=(*contract.ENGINE_OPTIONS, contract.ADAPTER),
            outputs=contract.ENGINE_OUTPUTS,
            constrains=True,
            options=(
                DTYPE_OPTION,
                Option("device", "auto", "Where the model runs: the CPU.", choices=("auto", "cpu")),
                Option(
                    "weight_format",
                    "auto",
                    "How weights are stored when a model is converted. auto changes none: those "
                    "that are exact in 16 bits are stored in 16 bits, those of a GGUF file in its "
                    "4 to 8 bits.",
                    choices=("auto", "fp32", "fp16", "bf16", "int8", "int4"),
                ),
                Option(
                    "int4_group",
                    32,
                    "How many int4 weights share a scale: the largest part of a row up to this.",
                    minimum=16,
                ),
                Option(
                    "int4_ratio",
                    0.68,
                    "Share of the weights between the first and the last in int4; the others, of "
                    "products with fewer outputs than inputs first, are int8.",
                    minimum=0,
                    maximum=1,
                ),
                Option(
                    "kv_cache",
                    "auto",
                    "Type of the cache; auto is the type used to compute, so nothing is rounded.",
                    choices=("auto", "f32", "bf16", "f16", "u8"),
                ),
                Option(
                    "dynamic_quantization",
                    32,
                    "With int8 or int4 weights, how many activations share a scale; 0 leaves them "
                    "unchanged.",
                    minimum=0,
                ),
                Option(
                    "exact_batches",
                    False,
                    "Scores are the same, bit by bit, whatever else is in a pass; it is slower.",
                ),
                Option(
                    "cache_gb",
                    0,
                    "Memory of the cache in GB; 0 lets it grow as requests need it.",
                    minimum=0,
                ),
                Option(
                    "max_sequences", 64, "Most sequences in flight at once; others wait.", minimum=1
                ),
                Option("prefix_cache", True, "Reuse the cache of prompts that begin alike."),
                *STATE_OPTIONS,
                *GUESS_OPTIONS,
                *ADAPTER_OPTIONS,
                *IMAGE_OPTIONS,
                Option("threads", 0, "Threads for computation; 0 means one per core.", minimum=0),
            ),
            requires=("openvino", "safetensors"),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(
            name="openvino",
            summary="Models on a CPU, with OpenVINO",
            tokenizer="transformers",
            generator="openvino",
            batching="continuous",
            suits={"cpu": 20},
        )
    ]


def _treatment(found: Quantised) -> Treatment:
    from llmserve_openvino.kept_forms import treatment

    return treatment(found)


def _prepare_generator(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_openvino.prepare import prepare

    return prepare(context)


def _needs(size: ModelSize, options: Mapping[str, Value]) -> Needs:
    from llmserve_openvino.needs import needs

    return needs(size, options)
