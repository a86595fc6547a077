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
        22 * MILLION,
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
    "Zamba2 1.2B": (
        "zamba2",
        {
            "hidden_size": 2048, "num_hidden_layers": 38, "num_attention_heads": 32,
            "n_mamba_heads": 64, "use_shared_attention_adapter": True, "use_mem_rope": True,
            "layers_block_type": (["mamba"] * 5 + ["hybrid"]) * 6 + ["mamba"] * 2,
        },
        {"hidden_size": 128, "n_mamba_heads": 4, "hybrid_layer_ids": [2, 3]},
        2 * MILLION,
    ),
    "Zamba": ("zamba", {}, {"attention_hidden_size": 928, "hidden_size": 464}, 11 * MILLION),
    "LFM2 8B A1B": (
        "lfm2_moe",
        {
            "num_hidden_layers": 24,
            "layer_types": ["full_attention" if n % 4 == 2 else "conv" for n in range(24)],
        },
        {**WITH_EXPERTS, "num_experts": 8, "num_dense_layers": 2, "hidden_size": 256},
        3 * MILLION,
    ),
    "dots.llm1": (
        "dots1",
        {
            "num_hidden_layers": 62, "n_routed_experts": 128, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_intermediate_size": 1408,
        },
        {**WITH_EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1},
        4 * MILLION,
    ),
    "Hunyuan A13B": (
        "hunyuan_v1_moe",
        {
            "num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 64,
            "moe_topk": [8] * 32, "intermediate_size": 3072,
        },
        {"num_experts": 8, "moe_topk": [4] * 4, "head_dim": 128},
        8 * MILLION,
    ),
    "DBRX": (
        "dbrx",
        {
            "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
            "ffn_config": {
                "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4,
                "moe_jitter_eps": 0,
            },
        },
        {"d_model": 512, "n_heads": 4, "n_layers": 4},
        8 * MILLION,
    ),
    "Gemma 4 E4B": (
        "gemma4_text",
        {
            "num_hidden_layers": 42, "num_key_value_heads": 2, "num_kv_shared_layers": 18,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
        },
        {"num_kv_shared_layers": 2, "sliding_window": 48},
        22 * MILLION,
    ),
    "Gemma 4 26B A4B": (
        "gemma4",
        {
            "text_config": {
                "num_attention_heads": 16, "num_key_value_heads": 8, "attention_k_eq_v": True,
                "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0,
                "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
                "moe_intermediate_size": 704,
            },
        },
        {"num_experts": 8, "top_k_experts": 4, "num_attention_heads": 4},
        25 * MILLION,
    ),
    "HRM": ("hrm_text", {}, {"num_layers_per_stack": 2, "num_hidden_layers": 16}, 2 * MILLION),
    "RWKV": ("rwkv", {}, {"hidden_size": 256, "attention_hidden_size": 256}, 2 * MILLION),
    "xLSTM": ("xlstm", {}, {"hidden_size": 256, "num_heads": 8, "num_blocks": 4}, 4 * MILLION),
    "Gemma 3n E4B": ("gemma3n_text", {}, {"num_kv_shared_layers": 2}, 36 * MILLION),
    # Its heads are in four parts.
    "CodeGen": ("codegen", {}, {"n_head": 4}, 52 * MILLION),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_of_a_large_shape_is_tried_as_a_small_one(name: str) -> None:
    """Its size is what decides how long a build takes before it refuses a model."""
    from transformers import CONFIG_MAPPING

    kind, settings, kept, most = SHAPES[name]
    model = small_model(CONFIG_MAPPING[kind](**settings))
    assert model is not None
    assert sum(parameter.numel() for parameter in model.parameters()) < most
    small = model.config.get_text_config()
    assert {setting: getattr(small, setting) for setting in kept} == kept
    with torch.inference_mode():
        assert model(input_ids=torch.arange(20)[None]).logits.isfinite().all()


def test_layers_of_other_heads_stay_other_ones() -> None:
    from transformers import Gemma4TextConfig

    settings = {"num_global_key_value_heads": 2, "attention_k_eq_v": True, "global_head_dim": 512}
    model = small_model(Gemma4TextConfig(num_key_value_heads=8, **settings))
    assert model is not None
    layers = zip(model.config.layer_types, model.config.per_layer_config, strict=True)
    assert [(kind, own.num_key_value_heads, own.head_dim) for kind, own in layers] == [
        ("sliding_attention", 2, 256),
        ("sliding_attention", 2, 256),
        ("full_attention", 1, 512),
        ("full_attention", 1, 512),
    ]


@pytest.mark.long
@pytest.mark.parametrize("is_old", [False, True])
def test_a_large_model_that_sees_is_tried_as_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    from transformers import Qwen3VLConfig, Qwen3VLVisionConfig

    if is_old:
        # Before 5.23, layers of a tower had one name.
        monkeypatch.setattr(
            Qwen3VLVisionConfig, "attribute_map", {"num_attention_heads": "num_heads"}
        )
    text, vision = {"hidden_size": 5120, "num_attention_heads": 64}, {"out_hidden_size": 5120}
    config = Qwen3VLConfig(text_config=text, vision_config=vision)
    model = small_model(config, loader="AutoModelForImageTextToText")
    assert model is not None
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    # Three of the tower's layers make rows that the first layers add.
    assert sum(parameter.numel() for parameter in model.parameters()) < 140 * MILLION


def test_a_model_of_several_parts_is_tried_whole() -> None:
    """It may make another mask than its part for texts does alone."""
    from transformers import Gemma4UnifiedConfig

    assert type(small_model(Gemma4UnifiedConfig())).__name__.endswith("ForConditionalGeneration")
