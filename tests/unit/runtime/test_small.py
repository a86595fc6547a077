"""A small model is small whatever the large one is, and is still of its kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmserve.runtime.causal import small_model

MILLION = 1_000_000
WITH_EXPERTS = {"num_experts_per_tok": 4}
# As released, from their config.json: what the size of the small model depends on.
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "Qwen3-Next-80B-A3B": (
        "qwen3_next",
        {
            "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 512,
            "num_experts_per_tok": 10, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "vocab_size": 151936,
        },
        {**WITH_EXPERTS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 8},
        20 * MILLION,
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {
            "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
            "vocab_size": 201088,
        },
        {**WITH_EXPERTS, "num_local_experts": 8, "sliding_window": 48},
        4 * MILLION,
    ),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        {
            "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
            "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
            "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1, "topk_method": "greedy", "vocab_size": 102400,
        },
        {**WITH_EXPERTS, "n_routed_experts": 8, "kv_lora_rank": 512},
        4 * MILLION,
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
            "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
            "n_group": 8, "topk_group": 4, "vocab_size": 129280,
        },
        {**WITH_EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
        7 * MILLION,
    ),
    "Granite 4 H Small": (
        "granitemoehybrid",
        {
            "hidden_size": 4096, "intermediate_size": 768, "shared_intermediate_size": 1536,
            "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
            "num_local_experts": 72, "num_experts_per_tok": 10, "mamba_n_heads": 128,
            "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_head": 64, "mamba_expand": 2,
            "vocab_size": 100352,
            "layer_types": ["mamba", "mamba", "mamba", "attention", "mamba"] * 8,
        },
        {**WITH_EXPERTS, "num_local_experts": 8, "mamba_n_heads": 16, "mamba_d_head": 64},
        12 * MILLION,
    ),
    "Gemma 2 9B": (
        "gemma2",
        {
            "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "sliding_window": 4096, "vocab_size": 256000,
        },
        {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 48},
        15 * MILLION,
    ),
    "Codestral Mamba": (
        "mamba2",
        {
            "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
            "n_groups": 8, "expand": 2, "state_size": 128, "vocab_size": 32768,
        },
        {"num_heads": 8, "n_groups": 2, "hidden_size": 256},
        4 * MILLION,
    ),
    "Falcon H1": ("falcon_h1", {"mamba_d_ssm": 3072, "mamba_n_heads": 24}, {}, 10 * MILLION),
    "Nemotron H": ("nemotron_h", {}, {"mamba_head_dim": 64}, 6 * MILLION),
    "Jamba": ("jamba", {"num_hidden_layers": 32}, {"attn_layer_offset": 0}, 10 * MILLION),
    "Bamba": ("bamba", {"attn_layer_indices": [9, 18, 27]}, {}, 10 * MILLION),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_of_a_large_shape_is_tried_as_a_small_one(name: str) -> None:
    """Its size is what decides how long a build takes before it refuses a model."""
    from transformers import CONFIG_MAPPING

    kind, settings, kept, most = SHAPES[name]
    model = small_model(CONFIG_MAPPING[kind](**settings))
    assert model is not None
    assert sum(parameter.numel() for parameter in model.parameters()) < most
    assert {setting: getattr(model.config, setting) for setting in kept} == kept
    with torch.inference_mode():
        assert model(input_ids=torch.arange(20)[None]).logits.isfinite().all()
