"""The plugin ``trtllm``: TensorRT-LLM's engines and LLM API, for the version that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmserve import hookimpl
from llmserve.options import INT32_MAX
from llmserve.roles import Batching, Generator, Option, Recipe
from llmserve.runtime import contract

if TYPE_CHECKING:
    from llmserve.builder.assembly import Assembly

_INPUTS = (contract.MAX_TOKENS, contract.STREAM, contract.STOP_WORDS)


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    """Register the engine: a model of its own in an ensemble."""
    from llmserve_trtllm.choices import OPTIONS, WISHES

    return [
        Generator(
            name="tensorrt_llm",
            summary="A TensorRT-LLM engine, or its LLM API, as a model of an ensemble",
            runtime="llmserve_trtllm.runtime.remote:RemoteEngine",
            modes=frozenset({"inflight", "batch"}),
            inputs=WISHES,
            options=OPTIONS,
            requires=("llmserve-trtllm",),
            assemble=_assemble,
        )
    ]


@hookimpl
def llmserve_register_batchings() -> Sequence[Batching]:
    """Register in-flight batching; static batching is everybody's."""
    return [
        Batching(
            name="inflight",
            summary="TensorRT-LLM's own: new requests join while others are under way",
            runtime="llmserve_trtllm.runtime.remote:RemoteEngine",
            mode="inflight",
            inputs=_INPUTS,
            options=(
                Option(
                    "max_batch_size",
                    8,
                    "Most requests that the engine takes at a time.",
                    minimum=1,
                    maximum=INT32_MAX,
                ),
            ),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    """Register what ``build --plugin trtllm`` selects."""
    return [
        Recipe(
            name="trtllm",
            summary="TensorRT-LLM: preprocessing, engine and postprocessing under an ensemble",
            tokenizer="transformers",
            generator="tensorrt_llm",
            batching="inflight",
            formatter="text",
        )
    ]


def _assemble(assembly: Assembly) -> None:
    from llmserve_trtllm.assemble import assemble

    assemble(assembly)
