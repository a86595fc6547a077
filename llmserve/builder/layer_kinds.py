"""What a model's layers keep of a sequence, by its configuration: keys and values, or a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_WINDOWED = ("sliding_attention", "chunked_attention", "hybrid_sliding")
_ATTENDING = ("full_attention", "attention", "hybrid", *_WINDOWED)
_WITH_STATE = ("linear_attention", "mamba", "conv", "hybrid")
_OTHER = "mlp"
_BYTES = 4
_MAMBA: Mapping[str, tuple[str, ...]] = {
    "heads": ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads"),
    "width": ("mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim"),
    "expand": ("mamba_expand", "expand"),
    "size": ("mamba_d_state", "ssm_state_size", "state_size"),
    "groups": ("mamba_n_groups", "mamba_ngroups", "n_groups"),
    "kernel": ("mamba_d_conv", "conv_kernel"),
}
"""What different kinds of models call Mamba's sizes."""


@dataclass(frozen=True)
class Layers:
    """How many layers of a model keep what."""

    count: int
    """All of them."""
    attending: int
    """Those that keep keys and values of tokens."""
    windowed: int
    """Those of them that look back only so far, if the model has a window."""
    with_state: int
    """Those that keep a state of fixed size, perhaps beside keys and values."""


def layers_of(config: Mapping[str, Any]) -> Layers:
    """Return how many of a model's layers keep what."""
    count = first(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if (kinds := _kinds(config, count)) is None:
        every = first(config, "sliding_window_pattern")
        return Layers(count, count, count - (count // every if every else 0), 0)
    with_state = sum(kind in _WITH_STATE for kind in kinds)
    attending = sum(kind in _ATTENDING for kind in kinds)
    # All attend, if none has a name that is known.
    return Layers(
        count,
        attending or (0 if with_state else count),
        sum(kind in _WINDOWED for kind in kinds),
        with_state,
    )


def state_bytes(config: Mapping[str, Any]) -> int:
    """Return the most that a sequence's states take, in all layers; 0 if that is not known.

    Sums that go on from token to token are kept in 32 bits, whatever type the weights have.
    """
    return _BYTES * layers_of(config).with_state * _state_of_layer(config)


def first(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these settings that is a count; 0 if none is."""
    found = (config.get(name) for name in names)
    return next((value for value in found if type(value) is int and value > 0), 0)


def _kinds(config: Mapping[str, Any], count: int) -> list[str] | None:
    """Return of which kind each layer is; None if a configuration does not tell them apart."""
    for name in ("layer_types", "layers_block_type"):
        if isinstance(listed := config.get(name), list):
            return [str(kind) for kind in listed]
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):
        return [{"M": "mamba", "*": "attention"}.get(mark, _OTHER) for mark in pattern]
    other = "conv" if "conv_L_cache" in config else "mamba"
    for name in ("full_attn_idxs", "attn_layer_indices"):
        if isinstance(chosen := config.get(name), list):
            return ["attention" if layer in chosen else other for layer in range(count)]
    for name, offset in (("full_attention_interval", -1), ("attn_layer_period", 0)):
        if every := first(config, name):
            at = config.get("attn_layer_offset", offset) % every
            return ["attention" if layer % every == at else other for layer in range(count)]
    if isinstance(own := config.get("linear_attn_config"), Mapping):
        chosen = own.get("full_attn_layers", ())
        return ["attention" if layer + 1 in chosen else other for layer in range(count)]
    if not _of_mamba(config, "size"):
        return None
    # Mamba itself has no attention; Falcon H1 has both in each layer.
    return ["hybrid" if first(config, "num_attention_heads") else "mamba"] * count


def _state_of_layer(config: Mapping[str, Any]) -> int:
    """Return how many numbers the state of a layer is."""
    kernel = first(config, "linear_conv_kernel_dim")
    if values := first(config, "linear_num_value_heads"):
        width, of_key = first(config, "linear_value_head_dim"), first(config, "linear_key_head_dim")
        keys = first(config, "linear_num_key_heads") * of_key
        return (2 * keys + values * width) * kernel + values * width * of_key
    own = config.get("linear_attn_config")
    own = own if isinstance(own, Mapping) else {}
    if heads := first(config, "linear_num_heads") or first(own, "num_heads"):
        width = first(config, "linear_head_dim") or first(own, "head_dim")
        kernel = kernel or first(own, "short_conv_kernel_size")
        return heads * width * (3 * kernel + width)
    if kernel := first(config, "conv_L_cache"):
        return first(config, "hidden_size") * kernel
    inner = first(config, "mamba_d_ssm") or _of_mamba(config, "heads") * _of_mamba(config, "width")
    # The first Mamba has no heads, or none of a width of their own.
    inner = inner or _of_mamba(config, "expand") * first(config, "hidden_size")
    size, groups = _of_mamba(config, "size"), _of_mamba(config, "groups")
    return (inner + 2 * groups * size) * _of_mamba(config, "kernel") + inner * size


def _of_mamba(config: Mapping[str, Any], what: str) -> int:
    return first(config, *_MAMBA[what])
