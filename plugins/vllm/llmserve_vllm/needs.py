"""How much memory a model takes in vLLM's engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmserve.plugin import (
    ModelSize,
    Needs,
    Quantised,
    Treatment,
    Value,
    adapter_bytes,
    loaded_type,
    place_needs,
)
from llmserve_vllm.lora_limits import highest_rank, slots
from llmserve_vllm.options import chosen_args, other_args

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
    loaded = loaded_type(size, str(dtype), on_gpu=found.on_gpu)
    copies, places = _adapters(size, options, 4 if loaded == "float32" else 2)
    shorter = [context // part for part in (4, 16) if context // part >= _SHORT]
    return replace(
        found,
        process=found.process + copies,
        adapters=places,
        cache=found.cache // (1 if options["kv_cache_dtype"] == "auto" else 2),
        on_all_gpus=int(options["tensor_parallel_size"]) > 1,
        instead=(*({"max_model_len": each} for each in shorter), *found.instead),
    )


def _adapters(size: ModelSize, options: Mapping[str, Value], width: int) -> tuple[int, int]:
    """Return what adapters take in the process, and the places for those of a step.

    A place is for the highest rank, and here for the products of the largest adapter: vLLM has one
    in every product to which it could add.
    """
    if not size.adapters:
        return 0, 0
    arguments = {**chosen_args(options), **other_args(options)}
    rank = highest_rank([each.rank for each in size.adapters], arguments)
    edges = max(each.edges for each in size.adapters)
    # Of the budget, each counts as twice what it takes.
    copies = adapter_bytes(size, options, 2 * width) // 2
    return copies, width * slots(arguments) * rank * edges
