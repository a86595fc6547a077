"""What a request asks for, in OpenVINO's words; what OpenVINO cannot do is refused."""

from __future__ import annotations

import secrets
from typing import Any

from openvino_genai import GenerationConfig

from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation

# Below this the likeliest token is all that is left of a distribution.
_COLD = 1e-5
_WORD = (1 << 32) - 1


def generation_config(generation: Generation, *, vocab_size: int) -> Any:
    """Return the ``GenerationConfig`` of a generation."""
    params, config = generation.params, GenerationConfig()
    config.max_new_tokens = generation.max_tokens - len(generation.token_ids)
    # OpenVINO writes into its scores at these, wherever that is, and a request may name any.
    ends = sorted(token for token in generation.eos_ids if token < vocab_size)
    # When an answer ends is for llmserve to say: it knows stop words and who has left. But what
    # must not end yet has to be told here, where tokens are chosen.
    config.ignore_eos = not (params.min_tokens and ends)
    # Without one it would look for a tokenizer's, which is not there.
    config.eos_token_id = ends[0] if ends else 0
    config.stop_token_ids = set(ends or [0])
    if not config.ignore_eos:
        config.min_new_tokens = params.min_tokens
    config.repetition_penalty = params.repetition_penalty
    config.presence_penalty = _penalty("presence_penalty", params.presence_penalty)
    config.frequency_penalty = _penalty("frequency_penalty", params.frequency_penalty)
    if params.heat >= _COLD and params.top_k != 1:
        _sample(config, generation)
    try:
        config.validate()
    except RuntimeError as error:
        told = str(error).strip().splitlines()[-1]
        raise RequestError(f"OpenVINO does not take this: {told}") from None
    return config


def _sample(config: Any, generation: Generation) -> None:
    params = generation.params
    config.do_sample = True
    config.temperature = params.heat
    config.top_p = params.top_p
    config.min_p = params.min_p
    if params.top_k > 0:
        config.top_k = params.top_k
    # It takes 32 bits of a seed, and 0 for who names none.
    seed = secrets.randbits(32) if params.seed is None else params.seed
    config.rng_seed = (seed ^ seed >> 32) & _WORD


def _penalty(name: str, value: float) -> float:
    if not -2 <= value <= 2:
        raise RequestError(f"{name} must be from -2 to 2 on this model, not {value:g}")
    return value
