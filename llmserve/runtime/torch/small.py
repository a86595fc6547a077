"""A small random model of the same kind as a large one, on which a way to compute can be tried.

What decides whether it can be computed (the kinds of its layers, how positions and masks are made,
how experts are chosen) is as in the large one. Its sizes are smaller, and what only shows far into
a text (windows, lengths after which positions change) begins early.
"""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from typing import Any

VOCABULARY = 512
NEAR = 48
"""How far a window reaches, and after how many tokens positions change."""
_CONTEXT = 1024
_LARGEST = 200_000_000
"""Parameters of a model that is not small."""
_LAYERS = 4
_WIDTH = 64
_FEW_EXPERTS = 32
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_WIDE = ("intermediate", "ffn_dim", "ffn_hidden", "n_inner", "dff", "feed_forward")
_WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "local_attention",
    "window_size",
    "index_topk",
    "indexer_budget",
)
_ORIGINAL = "original_max_position_embeddings"


def small_model(config: Any) -> Any | None:
    """Return a small random model for a configuration; None if there is no way to make one."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        small = _small(config.get_text_config())
        with torch.random.fork_rng():
            torch.manual_seed(0)
            with torch.device("meta"):
                sized = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
            if sum(each.numel() for each in sized.parameters()) > _LARGEST:
                return None
            model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
            _vary(model)
            with torch.inference_mode():
                model(input_ids=torch.arange(2)[None])
    except Exception:
        # A size depends on another in a way that only its own code knows.
        return None
    return model.requires_grad_(False)


def _small(config: Any) -> Any:
    small = deepcopy(config)
    count = config.num_hidden_layers
    chosen = _layers(config, count)
    small.num_hidden_layers = len(chosen)
    for name, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(small, name, [value[layer] for layer in chosen])
    small.vocab_size = VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, 0)
    # Where layers differ in their heads, they stay as they are.
    with suppress(AttributeError):
        _shrink_heads(small)
    for name, value in vars(small).items():
        if any(word in name for word in _WIDE) and not name.startswith("_"):
            if isinstance(value, int) and value > _WIDTH and not isinstance(value, bool):
                setattr(small, name, _WIDTH)
            elif isinstance(value, list):
                setattr(small, name, [min(each, _WIDTH) for each in value])
        elif name in _WINDOWS and isinstance(value, int) and value > NEAR:
            setattr(small, name, NEAR)
        elif name in _EXPERTS and isinstance(value, int) and value > _FEW_EXPERTS:
            setattr(small, name, _FEW_EXPERTS)
        elif name == "vocab_size_per_layer_input":
            setattr(small, name, VOCABULARY)
        elif name == "first_k_dense_replace":
            setattr(small, name, min(value, 1))
        elif name in ("num_kv_shared_layers", "max_window_layers"):
            setattr(small, name, min(value, len(chosen) // 2))
        elif name == "word_embed_proj_dim":
            setattr(small, name, small.hidden_size)
    _turn_early(small)
    return small


def _layers(config: Any, count: int) -> list[int]:
    """Return a few layers, among which is one of each kind."""
    lists = [
        value
        for value in vars(config).values()
        if isinstance(value, (list, tuple)) and len(value) == count
    ]
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(repr([value[layer] for value in lists]), layer)
    chosen = list(kinds.values())[:_LAYERS]
    others = [layer for layer in range(count) if layer not in chosen]
    return sorted([*chosen, *others[: max(0, min(count, _LAYERS) - len(chosen))]])


def _shrink_heads(config: Any) -> None:
    """Have few heads, each as wide as before, and as many of them share keys if they did."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    names = ("num_key_value_heads", "num_kv_heads")
    keys = next((each for name in names if (each := getattr(config, name, None))), heads)
    fewer = 1 if keys == 1 else 2
    config.num_attention_heads = fewer * min(2, heads // keys) if keys < heads else 2
    for name in names:
        if getattr(config, name, None):
            setattr(config, name, fewer if keys < heads else 2)
    config.hidden_size = config.num_attention_heads * width


def _turn_early(config: Any) -> None:
    """Have positions change after a few tokens, where they change at all."""
    ropes = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    ropes += [part for rope in ropes if isinstance(rope, dict) for part in rope.values()]
    for rope in (each for each in ropes if isinstance(each, dict)):
        if isinstance(rope.get(_ORIGINAL), int):
            rope[_ORIGINAL] = NEAR
    if isinstance(getattr(config, _ORIGINAL, None), int):
        setattr(config, _ORIGINAL, NEAR)
    length = getattr(config, "max_position_embeddings", None)
    if isinstance(length, int):
        config.max_position_embeddings = min(length, _CONTEXT)


def _vary(model: Any) -> None:
    """Give it clear preferences, and no bias or norm that has no effect, as trained ones have."""
    import torch

    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
        if parameter.ndim > 1 and 0 < spread < 0.1:
            parameter.data.mul_(0.12 / spread * min(1.0, (_WIDTH / parameter.shape[-1]) ** 0.5))
        elif parameter.ndim == 1 and spread < 0.03:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
