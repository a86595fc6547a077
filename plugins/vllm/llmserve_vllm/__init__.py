"""The plugin ``vllm``: vLLM's engine, which schedules, computes and chooses tokens itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from llmserve.plugin import (
    ADAPTER_OPTIONS,
    IMAGE_OPTIONS,
    BuildContext,
    Generator,
    ModelSize,
    Needs,
    Quantised,
    Recipe,
    Treatment,
    Value,
    contract,
    hookimpl,
)

# vLLM has its own sampler: an option that is new here is not there before `translate` passes it on.
_SAMPLING = {
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "random_seed", "min_tokens", "ignore_eos", "end_id", "bad_words",
}  # fmt: skip


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    from llmserve_vllm.options import OPTIONS

    return [
        Generator(
            name="vllm",
            summary="vLLM's engine: paged attention, its own scheduler and sampler",
            runtime="llmserve_vllm.generator:VllmGenerator",
            modes=frozenset({"step", "batch"}),
            prepare=_prepare,
            needs=_needs,
            quantised=_treatment,
            inputs=(
                *(tensor for tensor in contract.SAMPLING if tensor.name in _SAMPLING),
                contract.LOGIT_BIAS,
                *contract.LOGPROBS,
                contract.PROMPT_LOGPROBS,
                contract.ADAPTER,
            ),
            outputs=contract.ENGINE_OUTPUTS,
            constrains=True,
            options=(*OPTIONS, *ADAPTER_OPTIONS, *IMAGE_OPTIONS),
            requires=("llmserve-vllm",),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(
            name="vllm",
            summary="Models on vLLM's engine",
            generator="vllm",
            batching="continuous",
            # Without vLLM, what is built here could not be served here.
            suits={"cuda": 20} if find_spec("vllm") else {},
        )
    ]


def _prepare(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_vllm.prepare import prepare

    return prepare(context)


def _treatment(found: Quantised) -> Treatment:
    from llmserve_vllm.needs import treatment

    return treatment(found)


def _needs(size: ModelSize, options: Mapping[str, Value]) -> Needs:
    from llmserve_vllm.needs import needs

    return needs(size, options)
