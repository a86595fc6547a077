"""How much memory and disk a model takes, while it is converted and where it is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmserve.plugin import Cached, ModelSize, Needs, Value, adapter_bytes, loaded_type
from llmserve_openvino.kept_forms import treatment

PROCESS = 370_000_000
"""What Triton and a process of this engine take without a model (measured)."""
_CONVERTER = 500_000_000
"""What converting takes, whatever the size (measured)."""
_PART, _COMPARED = 300 << 20, 2.7
"""The bytes in float32 of the layers that are compared at once, and what that takes for each of
their numbers (measured). All else has a piece of a weight in memory at a time."""
_OF_PRODUCT = 130_000
"""What OpenVINO takes for each product that adapters add to, whatever their size (measured)."""
_CONTEXT = 2048
_GB = 1 << 30
_FLOAT32 = 4
_CACHE_BYTES = {"f16": 2, "u8": 1}
"""Of the types that are not the one to compute in."""
_KEPT = {
    "Q4_0": 5, "Q4_1": 6, "Q4_K": 6, "Q5_0": 9, "Q5_1": 9.25, "Q8_0": 9, "Q5_K": 9.25, "Q6_K": 10,
}  # fmt: skip
"""Bits of a number of each type that stays as a GGUF file has it, with its share of a scale."""
_CAPPED = 2 * _FLOAT32
"""Bytes of each number of a layer that caps its scores: read from its pages, and put in order."""
_WIDTHS = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0}


def needs(size: ModelSize, options: Mapping[str, Value]) -> Needs:
    """Return what a model takes; it is converted unless it was before."""
    if size.packed and treatment(size.packed.quantised) != "kept":
        # It is a checkpoint in 16 bits from then on, but for what is read.
        size = replace(size, packed=None, dtype="bfloat16")
    computed = loaded_type(size, str(options["dtype"]), on_gpu=False)
    chosen = str(options["weight_format"])
    stored = stored_bytes(size, options) if size.is_checkpoint else size.bytes
    is_kept = size.packed is not None or (chosen == "auto" and kept_bytes(size) > 0)
    weights = _in_memory(size, chosen, stored, computed) if size.is_checkpoint else stored
    kind = str(options["kv_cache"])
    width = _CACHE_BYTES.get(kind, 4 if computed == "float32" else 2)
    # Beyond them it serves none. What is before a window stays in the cache.
    limits = (size.context, size.unstretched)
    tokens = min((limit for limit in limits if limit), default=_CONTEXT)
    # Of a latent, it keeps the keys and values of all heads.
    of_token = (size.of_heads or size.cache) * width
    cache = of_token * tokens
    if limit := int(options["cache_gb"]) * _GB:
        tokens = min(tokens, limit // of_token if of_token else tokens)
        cache = min(cache, limit)
    cache += _CAPPED * (size.capped or 0) * tokens
    cached = Cached(
        size,
        tokens=tokens,
        sequences=int(options["max_sequences"]),
        copies=int(options["state_mb"]) * 1_000_000,
    )
    return Needs(
        build=_converted(size) if size.is_checkpoint else 0,
        reads=size.bytes + stored,
        # A format that is not the checkpoint's is written to a file of its own first.
        disk=stored if chosen == "auto" and not is_kept else 2 * stored,
        process=PROCESS,
        weights=weights,
        cache=cache + cached.states,
        adapters=_of_adapters(size, options, 4 if computed == "float32" else 2),
        mapped=stored,
        cached=str(cached),
        instead=_smaller(size, options, cache=cache + cached.states, weights=weights),
    )


def _of_adapters(size: ModelSize, options: Mapping[str, Value], width: int) -> int:
    products = max((adapter.products for adapter in size.adapters), default=0)
    return adapter_bytes(size, options, width) + _OF_PRODUCT * products


def _converted(size: ModelSize) -> int:
    """Return what converting takes: it compares one layer after the other, or several small ones.

    Of the table and of the product of the scores, a few rows are compared, unless all is small.
    """
    numbers, limit = size.parameters, _PART // _FLOAT32
    if numbers > limit:
        middle = max(0, numbers - size.ends)
        layer = middle // size.layers if size.layers else min(middle, max(limit, size.largest))
        numbers = min(middle, max(1, limit // max(1, layer)) * layer)
    return _CONVERTER + int(_COMPARED * numbers)


def _in_memory(size: ModelSize, chosen: str, stored: int, computed: str) -> int:
    """Return what weights take in the form that the processor reads (measured).

    The file's own pages are given back, and of it only the table of tokens is read later. Where
    table and product of the scores are tied, they are in memory once.
    """
    if size.packed:
        others = _without_packed(size)
        packed = _packed_bytes(size)
        return packed + _in_memory(others, chosen, stored - packed, computed)
    table = max(0, size.ends - size.largest)
    if chosen == "auto" and kept_bytes(size):
        return stored
    if chosen in ("int8", "int4"):
        return stored - table
    held = size.parameters - table
    if computed != "float32":
        return 2 * held
    width = stored // max(1, size.parameters)
    # Weights in 16 bits stay so. The product of the scores was widened with AVX-512;
    # where it stays, as with AVX2 only, the plan is that much too large.
    return width * held + (4 * size.largest if width < _FLOAT32 else 0)


def stored_bytes(size: ModelSize, options: Mapping[str, Value]) -> int:
    """Return what the converted weights take on the disk."""
    if size.packed:
        return _packed_bytes(size) + stored_bytes(_without_packed(size), options)
    chosen = str(options["weight_format"])
    if chosen == "auto":
        return kept_bytes(size) or size.parameters * (4 if size.dtype == "float32" else 2)
    if chosen != "int4":
        return int(size.parameters * _WIDTHS[chosen])
    ratio = float(options["int4_ratio"])
    # A group has a scale of 32 bits and a zero point of 8.
    width = 0.5 + 5 / int(options["int4_group"])
    # The table and the product of the scores stay in 8 bits.
    middle = size.parameters - size.ends
    return int(size.ends + middle * (ratio * width + (1 - ratio)))


def _packed_bytes(size: ModelSize) -> int:
    """Return what weights that stay quantised take: a group's scale has 32 bits, its zero point 8.

    In the checkpoint, a scale has 16, and a zero point those of a number.
    """
    if (packed := size.packed) is None:
        return 0
    quantised = packed.quantised
    groups = packed.parameters // quantised.group if quantised.group else 0
    return packed.bytes + groups * (40 - 16 - quantised.bits) // 8


def _without_packed(size: ModelSize) -> ModelSize:
    """Return the size of those weights of a checkpoint that are not quantised."""
    packed = size.packed.parameters if size.packed else 0
    return replace(size, parameters=size.parameters - packed, packed=None)


def kept_bytes(size: ModelSize) -> int:
    """Return what weights take that stay as a GGUF file has them; 0 if they are widened."""
    kept = {kind: count for kind, count in size.kinds.items() if kind in _KEPT}
    others = sum(size.kinds.values()) - sum(kept.values())
    if 2 * others > size.parameters or not kept:
        return 0
    return int(2 * others + sum(count * _KEPT[kind] / 8 for kind, count in kept.items()))


def _smaller(
    size: ModelSize, options: Mapping[str, Value], *, cache: int, weights: int
) -> tuple[Mapping[str, Value], ...]:
    """Return changes of options, the one that costs least first."""
    formats: list[dict[str, Value]] = []
    if size.is_checkpoint and options["weight_format"] not in ("int8", "int4"):
        formats = [{"weight_format": "int8"}, {"weight_format": "int4"}]
    limits: list[dict[str, Value]] = [
        {"cache_gb": each} for each in (4, 1) if cache > each * _GB and not options["cache_gb"]
    ]
    if size.state:
        sequences = int(options["max_sequences"])
        fewer: list[dict[str, Value]] = [{"max_sequences": n} for n in (8, 1) if n < sequences]
        limits = [*fewer, *limits]
    both = [{**limit, **each} for each in formats for limit in limits]
    first = [*limits, *formats] if cache > weights else [*formats, *limits]
    return tuple([*first, *both])
