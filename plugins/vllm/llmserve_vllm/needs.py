"""How much memory a model takes in vLLM's engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmserve.plugin import ModelSize, Needs, Quantised, Treatment, Value, place_needs

_SHORT = 1024
"""A context below which hardly any question fits."""


def treatment(_: Quantised) -> Treatment:
    """Return what becomes of quantised weights: there is a kernel for each method.

    vLLM refuses what it has none for with its own words.
    """
    return "kept"


def needs(size: ModelSize, options: Mapping[str, Value]) -> Needs:
    """Return what a model takes with a cache of one whole context, without which vLLM ends."""
    context = min(int(options["max_model_len"]) or size.context, size.context)
    # It computes in 16 bits on any processor, unless the checkpoint has 32.
    dtype = size.dtype if options["dtype"] == "auto" else options["dtype"]
    found = place_needs(
        size,
        {**options, "dtype": dtype, "instances": 1},
        tokens=context,
        treatment=treatment,
    )
    shorter = [context // part for part in (4, 16) if context // part >= _SHORT]
    return replace(
        found,
        cache=found.cache // (1 if options["kv_cache_dtype"] == "auto" else 2),
        on_all_gpus=int(options["tensor_parallel_size"]) > 1,
        instead=(*({"max_model_len": each} for each in shorter), *found.instead),
    )
