"""What is done because vLLM has no public way for it, and how one notices that it can go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_KEEPS_SEEDS = (0, 32)


def forbid(params: Any, words: Sequence[Sequence[int]]) -> None:
    """Forbid words by their ids.

    vLLM's own ``bad_words`` forbids a word after a space only if that is as many tokens as without
    one (seen in 0.32.0), so that an answer may have it. Can go when ``SamplingParams`` takes ids:
    then it has a public field for them.
    """
    params._bad_words_token_ids = [list(ids) for ids in words]


def end_engine(engine: Any) -> None:
    """Free what an engine holds, so that there is room for another.

    Can go when ``LLMEngine`` has a ``shutdown`` of its own (it has none in 0.32.0).
    """
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def keep_seeds() -> None:
    """Let requests with seeds draw by them, whatever runs beside them.

    vLLM for CPUs ignores the seeds of a batch unless every row has one, so that a neighbour without
    a seed changes an answer (seen in 0.27.1, not in 0.32.0). Its way for all processors
    keeps them. Can go when the oldest vLLM that the plugin takes keeps them on a CPU.
    """
    from vllm import __version__

    major, minor = __version__.split(".")[:2]
    if (int(major), int(minor)) >= _KEEPS_SEEDS:
        return
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_native


def compile_nothing() -> None:
    """Let PyTorch compile nothing in this process.

    With ``enforce_eager``, vLLM still compiles how it counts a token's rank: all requests wait for
    15 s when the first of them asks for log-probabilities (seen in 0.32.0). Can go when that answer
    takes no longer than the next.
    """
    import torch

    torch.compiler.set_stance("force_eager")


def leave_rows_without_adapters() -> None:
    """Let rows without an adapter, in a step with others that have one, be the model's own.

    vLLM's products for CPUs take such a row's slot, -1, for the last one, so that it gets what the
    adapter there adds (seen in 0.32.0; vllm-project/vllm#48421). Can go when the live test of
    adapters passes without.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def shrink_rows(
        inputs: Any, weights: Any, outputs: Any, slots: Any, scaling: float = 1.0
    ) -> None:
        shrink(inputs, weights, outputs, slots, scaling)
        outputs.masked_fill_((slots < 0).unsqueeze(1), 0)

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = shrink_rows
