"""The plugin ``trtllm``: serves TensorRT-LLM engines and its LLM API, for a chosen version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmserve.plugin import (
    Batching,
    CheckedModel,
    Generator,
    Problem,
    Recipe,
    hookimpl,
)

if TYPE_CHECKING:
    from llmserve.plugin import Assembly

LIMITS = "llmserve_trtllm.runtime.engine_request:EngineLimits"
"""What every part that reads requests knows of the engine."""
SEEN = "seen"
"""What those settings call a model that reads images: where its processor is, and the limits."""


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    from llmserve.plugin import ADAPTER_OPTIONS, IMAGE_OPTIONS
    from llmserve_trtllm.options import OPTIONS, SAMPLING

    return [
        Generator(
            name="tensorrt_llm",
            summary="A TensorRT-LLM engine, or its LLM API, as a model of an ensemble",
            runtime=LIMITS,
            modes=frozenset({"inflight", "batch"}),
            inputs=SAMPLING,
            options=(*OPTIONS, *ADAPTER_OPTIONS, *IMAGE_OPTIONS),
            # What its engines read is known by the TensorRT-LLM that builds them.
            quantised=lambda _: "kept",
            # No needs: an engine mostly runs on another machine, and its cache takes a share of
            # what is left of the GPU there (kv_cache_free_gpu_mem_fraction), whatever the model.
            requires=("llmserve-trtllm",),
            assemble=_assemble,
        )
    ]


@hookimpl
def llmserve_register_batchings() -> Sequence[Batching]:
    """Register in-flight batching; static batching is in the core."""
    from llmserve_trtllm.options import BATCH_SIZE

    return [
        Batching(
            name="inflight",
            summary="TensorRT-LLM's own: new requests join while others are running",
            runtime=LIMITS,
            requires=(),
            mode="inflight",
            options=(BATCH_SIZE,),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(
            name="trtllm",
            summary="TensorRT-LLM's engines or its LLM API",
            generator="tensorrt_llm",
            batching="inflight",
        )
    ]


@hookimpl
def llmserve_check_model(model: CheckedModel) -> Sequence[Problem]:
    """Find problems in a model made from NVIDIA's templates."""
    from llmserve_trtllm.check import check_model

    return list(check_model(model))


def _assemble(assembly: Assembly) -> None:
    from llmserve_trtllm.assemble import assemble

    assemble(assembly)
