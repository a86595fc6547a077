"""What is done because vLLM has no public way for it, and how one notices that it can go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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


def compile_nothing() -> None:
    """Let PyTorch compile nothing in this process.

    With ``enforce_eager``, vLLM still compiles how it counts a token's rank: all requests wait for
    15 s when the first of them asks for log-probabilities (seen in 0.32.0). Can go when that answer
    takes no longer than the next.
    """
    import torch

    torch.compiler.set_stance("force_eager")
