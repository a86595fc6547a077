"""A small random model of the same kind as a large one, on which a way to compute can be tried.

What decides whether it can be computed (the kinds of its layers, how positions and masks are made,
how experts are chosen) is as in the large one. Its sizes are smaller, and what only shows far into
a text (windows, lengths after which positions change) begins early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

VOCABULARY = 512
NEAR = 48
"""How far a window reaches, and after how many tokens positions change."""
_CONTEXT = 1024
_LARGEST = 200_000_000
"""Parameters of a model that is not small."""
_LAYERS, _MOST_LAYERS = 4, 6
_WIDTH = 64
_HIDDEN = 256
"""How wide a model is that has no heads to count it by."""
_FEW_HEADS = (2, 4)
"""How many heads there are at least: some kinds split theirs in four parts."""
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
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_expand"),
    ("num_heads", "head_dim", "n_groups", "expand"),
)
"""How the scans of Mamba 2 are called: heads, their width, their groups, and the share of the
model's width that all heads have together."""
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
_HEADS = ("num_attention_heads", *_KEY_HEADS)
_SHARED = "num_kv_shared_layers"
"""How many of the last layers have keys and values of others."""
_OF_LAYERS = ("attn_config", "ffn_config")
"""Parts of a configuration that tell how its layers are made."""
_OTHER_INPUT = ("vision_config", "audio_config")
"""Parts that read no text."""
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


def small_model(config: Any, *, loader: str = "AutoModelForCausalLM") -> Any | None:
    """Return a small random model for a configuration; None if there is no way to make one.

    ``loader`` is the class of transformers that makes models of its kind.
    """
    for heads in _FEW_HEADS:
        # A size may depend on another in a way that only its own code knows.
        with suppress(Exception):
            if model := _made(_whole(config, _small(config.get_text_config(), heads)), loader):
                return model
    return None


def _whole(config: Any, text_config: Any) -> Any:
    """Return a configuration with another for texts, which some kinds have as one of its parts.

    They may compute texts otherwise than the part alone does, such as with a mask of their own.
    """
    if (large := config.get_text_config()) is config:
        whole = text_config
    else:
        whole = deepcopy(config)
        setattr(whole, next(n for n, each in vars(config).items() if each is large), text_config)
    for part in _parts(whole, _OTHER_INPUT):
        # Qwen's towers have a depth, which is another name of the first since 5.23.
        for name in ("num_hidden_layers", "num_blocks", "depth"):
            if hasattr(part, name):
                setattr(part, name, 2)
        # What it makes is as wide as a text's tokens.
        if hasattr(part, "out_hidden_size"):
            part.out_hidden_size = text_config.hidden_size
    return whole


def _made(config: Any, loader: str) -> Any | None:
    """Return a model that computes; None if it is not small."""
    import torch
    import transformers

    makes = getattr(transformers, loader)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with torch.device("meta"):
            sized = makes.from_config(config, dtype=torch.float32)
        if sum(each.numel() for each in sized.parameters()) > _LARGEST:
            return None
        model = makes.from_config(config, dtype=torch.float32).eval()
        _vary(model)
        with torch.inference_mode():
            model(input_ids=torch.arange(2)[None])
    return model.requires_grad_(False)


def _small(config: Any, heads: int) -> Any:
    small, count = deepcopy(config), config.num_hidden_layers
    own = _own_settings(config)
    if own:
        small.per_layer_config = None
    large = deepcopy(small)
    chosen = _layers(small, own)
    small.num_hidden_layers = len(chosen)
    for name, value in vars(large).items():
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(small, name, [value[layer] for layer in chosen])
    small.vocab_size = VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, 0)
    # Where layers differ in their heads without saying so for each, they stay as they are.
    with suppress(AttributeError):
        _shrink_heads(small, heads)
    if not hasattr(small, "num_attention_heads"):
        small.hidden_size = min(small.hidden_size, _HIDDEN)
    _shrink_recurrence(small)
    for part in (small, *_parts(small, _OF_LAYERS)):
        _shrink_experts(part)
        for name, value in vars(part).items():
            setattr(part, name, _shrunk(name, value))
        if part is not small and hasattr(part, "hidden_size"):
            part.hidden_size = small.hidden_size
    for name, value in vars(large).items():
        if name == "first_k_dense_replace":
            setattr(small, name, min(value, 1))
        elif name == _SHARED:
            setattr(small, name, sum(layer >= count - value for layer in chosen))
        elif name == "max_window_layers":
            setattr(small, name, min(value, len(chosen) // 2))
        elif name in ("word_embed_proj_dim", "embedding_dim", "lru_width"):
            setattr(small, name, small.hidden_size)
        elif name == "attention_hidden_size":
            setattr(small, name, value * small.hidden_size // large.hidden_size)
        elif name == "hybrid_layer_ids":
            kinds = enumerate(small.layers_block_type)
            setattr(small, name, [layer for layer, kind in kinds if kind == "hybrid"])
        elif name == "num_blocks":
            setattr(small, name, len(chosen))
        elif name == "num_layers_per_stack":
            # Each layer counts as often as it is passed.
            setattr(small, name, min(value, 2))
            small.num_hidden_layers = count // value * small.num_layers_per_stack
        elif name == "attn_layer_indices" and value:
            setattr(small, name, [1])
        elif name == "attn_layer_period":
            setattr(small, name, min(value, _LAYERS))
            small.attn_layer_offset = small.attn_layer_offset % small.attn_layer_period
    _turn_early(small)
    if own:
        small.per_layer_config = {
            layer: {name: _of_layer(name, each, large, small) for name, each in own[at].items()}
            for layer, at in enumerate(chosen)
            if at in own
        }
    return small


def _parts(config: Any, names: Sequence[str]) -> list[Any]:
    """Return those parts of a configuration that it has."""
    found = (getattr(config, name, None) for name in names)
    return [each for each in found if hasattr(each, "__dict__")]


def _shrunk(name: str, value: Any) -> Any:
    """Return a setting as a small model has it, where that depends on nothing else."""
    if any(word in name for word in _WIDE) and not name.startswith("_"):
        if isinstance(value, int) and not isinstance(value, bool):
            return min(value, _WIDTH)
        if isinstance(value, list):
            return [min(each, _WIDTH) for each in value]
    if name in _WINDOWS and isinstance(value, int):
        return min(value, NEAR)
    return VOCABULARY if name == "vocab_size_per_layer_input" else value


def _own_settings(config: Any) -> dict[int, dict[str, Any]]:
    """Return what single layers have that others do not."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    return {int(layer): own for layer, own in config.to_dict()["per_layer_config"].items()}


def _of_layer(name: str, value: Any, large: Any, small: Any) -> Any:
    """Return the setting of a single layer as a small model has it."""
    if name in _HEADS and isinstance(value, int):
        return max(1, value * getattr(small, name) // getattr(large, name))
    return _shrunk(name, value)


def _layers(config: Any, own: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return a few layers, among which is one of each kind, and then another of each."""
    count = config.num_hidden_layers
    lists = [
        value
        for value in vars(config).values()
        if isinstance(value, (list, tuple)) and len(value) == count
    ]
    first_shared = count - getattr(config, _SHARED, 0)
    seen: Counter[str] = Counter()
    order: list[tuple[int, int]] = []
    for layer in range(count):
        values = [value[layer] for value in lists]
        kind = repr([*values, layer >= first_shared, own.get(layer)])
        order.append((seen[kind], layer))
        seen[kind] += 1
    kept = min(max(_LAYERS, len(seen)), _MOST_LAYERS)
    return sorted(layer for _, layer in sorted(order)[:kept])


def _shrink_heads(config: Any, few: int) -> None:
    """Have few heads, each as wide as before, and as many of them share keys if they did."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    holders = [(p, name) for p in (config, *_parts(config, _OF_LAYERS)) for name in _KEY_HEADS]
    known = [count for each, name in holders if (count := getattr(each, name, None))]
    keys = known[0] if known else heads
    fewer = 1 if keys == 1 else 2
    config.num_attention_heads = fewer * min(2, heads // keys) if keys < heads else few
    for each, name in holders:
        if getattr(each, name, None):
            setattr(each, name, fewer if keys < heads else few)
    hidden = config.num_attention_heads * width
    # Some attend to the table's output as well, and are wider there.
    if wide := getattr(config, "attention_hidden_size", None):
        hidden = hidden * config.hidden_size // wide
    config.hidden_size = hidden


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
        # Some have them as wide as the model is, or some times that.
        fewer = int(expand * config.hidden_size) // width
        if getattr(config, "mamba_d_ssm", None):
            fewer = min(4, heads)
            config.mamba_d_ssm = fewer * width
        if 0 < fewer < heads:
            setattr(config, names[0], fewer)
            setattr(config, names[2], min(2 - fewer % 2, groups))
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
