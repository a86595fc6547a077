"""The plugin ``trtllm``: TensorRT-LLM's engines and LLM API, for the version that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmserve.plugin import (
    Batching,
    CheckedModel,
    Generator,
    Option,
    Pair,
    Problem,
    Recipe,
    hookimpl,
)

if TYPE_CHECKING:
    from llmserve.plugin import Assembly

# Any model can be served so, and without TensorRT-LLM a stand-in answers. Who has an engine says
# where: --build engine=DIR.
_LLMAPI = {"layout": "llmapi", "stand_in": "true"}
_ENGINE = ("layout", "engine", "build_engine")
_LIMITS = "llmserve_trtllm.runtime.engine_request:EngineLimits"
_BATCH_SIZE = Option(
    "max_batch_size", 8, "Most requests that the engine takes at a time.", minimum=1
)


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    from llmserve_trtllm.options import OPTIONS, SAMPLING

    return [
        Generator(
            name="tensorrt_llm",
            summary="A TensorRT-LLM engine, or its LLM API, as a model of an ensemble",
            runtime=_LIMITS,
            modes=frozenset({"inflight", "batch"}),
            inputs=SAMPLING,
            options=OPTIONS,
            requires=("llmserve-trtllm",),
            assemble=_assemble,
        )
    ]


@hookimpl
def llmserve_register_batchings() -> Sequence[Batching]:
    """In-flight batching; static batching is everybody's."""
    return [
        Batching(
            name="inflight",
            summary="TensorRT-LLM's own: new requests join while others are under way",
            runtime=_LIMITS,
            requires=(),
            mode="inflight",
            options=(_BATCH_SIZE,),
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
            pairs=(
                Pair(
                    "trtllm-static-inflight",
                    "static=trtllm:batching=static",
                    "inflight=trtllm:",
                    {**_LLMAPI, "decoupled": "false"},
                    _ENGINE,
                ),
                Pair("hf-trtllm", "hf=hf:", "trtllm=trtllm:", _LLMAPI, _ENGINE),
            ),
        )
    ]


@hookimpl
def llmserve_check_model(model: CheckedModel) -> Sequence[Problem]:
    """Find what would not load or not work in a repository made from NVIDIA's templates."""
    from llmserve_trtllm.check import check_model

    return list(check_model(model))


def _assemble(assembly: Assembly) -> None:
    from llmserve_trtllm.assemble import assemble

    assemble(assembly)
