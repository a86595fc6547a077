"""Tiny random models of every family, built from their configurations alone."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers

VOCAB = 97
CONTEXT = 128

_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_NARROW = {key: _LLAMA[key] for key in _LLAMA if key not in ("head_dim", "num_key_value_heads")}
_GEMMA = {**_LLAMA, "query_pre_attn_scalar": 8, "sliding_window": 12}
_EXPERTS = {
    **_NARROW,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}),
    "llama": ("Llama", _LLAMA),
    "qwen2": ("Qwen2", {**_NARROW, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3", _LLAMA),
    "mistral": ("Mistral", {**_LLAMA, "sliding_window": 12}),
    "gemma": ("Gemma", _LLAMA),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3": ("Gemma3Text", _GEMMA),
    "phi3": ("Phi3", {**_LLAMA, "pad_token_id": 0}),
    "gpt_neox": ("GPTNeoX", _NARROW),
    "opt": ("OPT", {**_NARROW, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "falcon": ("Falcon", {**_NARROW, "multi_query": True, "alibi": False}),
    "falcon_alibi": ("Falcon", {**_NARROW, "multi_query": False, "alibi": True}),
    "phimoe": ("Phimoe", {**_EXPERTS, "num_local_experts": 4, "sliding_window": 12}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_EXPERTS, "num_experts": 4, "use_sliding_window": True, "sliding_window": 12},
    ),
    "lfm2": (
        "Lfm2",
        {
            **_NARROW,
            "num_key_value_heads": 2,
            "block_ff_dim": 48,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "mamba": ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "mamba2": (
        "Mamba2",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **_EXPERTS,
            "head_dim": 8,
            "num_experts": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "bamba": (
        "Bamba",
        {
            **_NARROW,
            "num_key_value_heads": 2,
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 16,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_NARROW,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
}

_CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def make_model(family: str = "gpt2", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a new model; the same family always has the same weights."""
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        **{"vocab_size": VOCAB, **settings, **changes},
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(5)
    model = getattr(transformers, _CLASSES.get(name, f"{name}ForCausalLM"))(config)
    with torch.no_grad():
        # Random weights give nearly uniform scores; larger weights give clear preferences.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model.to(dtype).eval()


def with_cache_called(model: Any, name: str) -> Any:
    """Return a model that calls its cache by this name, as other versions of transformers do."""
    kind = type(model)
    names = inspect.signature(kind.forward).parameters
    own = next(each for each in ("cache", "past_key_values", "cache_params") if each in names)

    def forward(self: Any, input_ids: Any = None, **inputs: Any) -> Any:
        output = kind.forward(self, input_ids, **{own: inputs.pop(name, None)}, **inputs)
        output[name] = output.get(own)
        return output

    taken = [each for each in names.values() if each.name != own]
    named = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
    positional = [each for each in taken if each.kind is not each.VAR_KEYWORD]
    rest = [each for each in taken if each.kind is each.VAR_KEYWORD]
    keywords = [each.replace(kind=each.KEYWORD_ONLY) for each in positional[2:]]
    signature = inspect.Signature([*positional[:2], *keywords, named, *rest])
    vars(forward)["__signature__"] = signature
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model
