"""What a small model of a kind shows before a large one is read."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from llmserve.plugin import UnservedError
from llmserve_iterative.trial import try_small

MIXED = ["linear_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(),
        # Its window is only in its mask, and it has experts.
        transformers.PhimoeConfig(sliding_window=2047, max_position_embeddings=4096),
        transformers.Llama4TextConfig(),
        transformers.Gemma2Config(),
        transformers.Qwen3NextConfig(num_hidden_layers=4, layer_types=MIXED),
        transformers.MambaConfig(),
        # It chooses what it attends to, beyond as many tokens as it chooses.
        transformers.DeepseekV32Config(),
    ],
    ids=lambda config: config.model_type,
)
def test_a_kind_that_can_be_decoded_is_accepted(config: Any) -> None:
    try_small(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.OpenAIGPTConfig(), "no cache"),
        (transformers.RecurrentGemmaConfig(), "no cache"),
    ],
    ids=["without", "in its layers"],
)
def test_a_kind_that_cannot_is_refused_by_its_part(config: Any, words: str) -> None:
    with pytest.raises(UnservedError, match=words):
        try_small(config)
