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
_HIDDEN = 256
"""How wide a model is that has no heads to count it by."""
_FEW_EXPERTS, _CHOSEN = 8, 4
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP = (
    "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k",
    "moe_k",
)  # fmt: skip
"""How many of the experts a token is sent to."""
_SCANS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_expand"),
    ("mamba_num_heads", "mamba_head_dim", "n_groups", "expand"),
    ("num_heads", "head_dim", "n_groups", "expand"),
)
"""How the scans of Mamba 2 are called: heads, their width, their groups, and the share of the
model's width that all heads have together."""
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
    _shrink_recurrence(small)
    _shrink_experts(small)
    for name, value in vars(small).items():
        if any(word in name for word in _WIDE) and not name.startswith("_"):
            if isinstance(value, int) and value > _WIDTH and not isinstance(value, bool):
                setattr(small, name, _WIDTH)
            elif isinstance(value, list):
                setattr(small, name, [min(each, _WIDTH) for each in value])
        elif name in _WINDOWS and isinstance(value, int) and value > NEAR:
            setattr(small, name, NEAR)
        elif name == "vocab_size_per_layer_input":
            setattr(small, name, VOCABULARY)
        elif name == "first_k_dense_replace":
            setattr(small, name, min(value, 1))
        elif name in ("num_kv_shared_layers", "max_window_layers"):
            setattr(small, name, min(value, len(chosen) // 2))
        elif name == "word_embed_proj_dim":
            setattr(small, name, small.hidden_size)
        elif name == "attn_layer_indices" and value:
            setattr(small, name, [1])
        elif name == "attn_layer_period":
            setattr(small, name, min(value, _LAYERS))
            small.attn_layer_offset = small.attn_layer_offset % small.attn_layer_period
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


def _shrink_recurrence(config: Any) -> None:
    """Have few heads in the layers that keep a state, each as wide as before."""
    keys, values = (getattr(config, f"linear_num_{kind}_heads", None) for kind in ("key", "value"))
    if keys and values:
        config.linear_num_key_heads = min(2, keys)
        config.linear_num_value_heads = min(2, keys) * min(2, values // keys)
    for names in _SCANS:
        heads, width, groups, expand = (getattr(config, name, None) for name in names)
        if not (isinstance(heads, int) and isinstance(width, int) and groups and expand):
            continue
        if not hasattr(config, "num_attention_heads"):
            config.hidden_size = min(config.hidden_size, _HIDDEN)
        # Some have them as wide as the model is, or some times that.
        fewer = int(expand * config.hidden_size) // width
        if getattr(config, "mamba_d_ssm", None):
            fewer = min(4, heads)
            config.mamba_d_ssm = fewer * width
        if fewer % 2 == 0 and fewer < heads:
            setattr(config, names[0], fewer)
            setattr(config, names[2], min(2, groups))
        break


def _shrink_experts(config: Any) -> None:
    """Have few experts, of which a token is still sent to several, and of several groups."""
    counts = {name: getattr(config, name, None) for name in _EXPERTS}
    many = [n for n, count in counts.items() if isinstance(count, int) and count > _FEW_EXPERTS]
    if not many:
        return
    for name in many:
        setattr(config, name, _FEW_EXPERTS)
    top = _CHOSEN
    if isinstance(zeros := getattr(config, "zero_expert_num", None), int):
        config.zero_expert_num = min(zeros, _FEW_EXPERTS)
    if (groups := getattr(config, "n_group", None)) and groups > 1:
        # Each has two at least, which is how many some kinds compare in a group.
        config.n_group = 4 if groups >= 4 else 2
        config.topk_group = min(config.topk_group, config.n_group // 2)
        top = min(top, config.topk_group * _FEW_EXPERTS // config.n_group)
    for name in _TOP:
        chosen = getattr(config, name, None)
        if isinstance(chosen, int):
            setattr(config, name, min(chosen, top))
        elif isinstance(chosen, list):
            setattr(config, name, [min(each, top) for each in chosen])


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
