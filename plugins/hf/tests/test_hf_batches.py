"""What is answered together is what is answered alone, also by models that read the padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llmserve.testing import ByteTokenizer
from llmserve.testing.fake import generation
from llmserve_hf.generator import TransformersGenerator

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 30,
    "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
}  # fmt: skip
CONFIGS = {
    "rwkv": transformers.RwkvConfig(**SMALL, attention_hidden_size=32, context_length=128),
    "longrope": transformers.Phi3Config(
        **SMALL, num_attention_heads=4, intermediate_size=48, max_position_embeddings=128,
        original_max_position_embeddings=30, rope_parameters=ROPE, pad_token_id=0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_texts_of_different_lengths_are_answered_as_alone(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8)
    model.save_pretrained(tmp_path)
    settings = {"path": ".", "device": "cpu", "dtype": "float32"}
    generator = TransformersGenerator(settings, tmp_path)

    def answered(*lengths: int) -> list[Any]:
        texts = [[(7 * place + length) % 63 + 1 for place in range(length)] for length in lengths]
        asked = [generation(text, 6, decode=lambda _: "", logprobs=1) for text in texts]
        generator.generate(asked, ByteTokenizer())
        return [(each.token_ids, [one.value for one in each.logprobs]) for each in asked]

    lengths = (40, 9, 21, 9)
    for together, (alone,) in zip(answered(*lengths), map(answered, lengths), strict=True):
        assert together[0] == alone[0]
        assert together[1] == pytest.approx(alone[1], abs=1e-4)
