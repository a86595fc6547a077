"""Makes a large model one of a few of its layers after the other, to be compared part by part.

So the copies of the weights that a library makes take the memory of a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from llmserve.graphs.stored import StoredWeights

# What the weights of one comparison may take in float32, of which OpenVINO makes two copies.
_PART = 300 << 20
# As many tokens as are enough for a part.
TOKENS = 4096


def parts(model: Any, stored: StoredWeights, limit: int = _PART) -> Iterator[float]:
    """Make the model one of a few of its layers and tokens after the other; none if it is small.

    With each comes the share of layers up to it. A model whose layers cannot be told stays whole.
    """
    layers = None if stored.bytes_in_float32(model) <= limit else _layers_of(model)
    if layers is None:
        return
    ends = [layer for layer in stored.layers.values() if layer.module in _ends_of(model)]
    whole = [(layer, layer.weight, layer.bias) for layer in ends]
    for layer in ends:
        layer.keep_rows(TOKENS)
    try:
        for first, last in _ranges([stored.bytes_in_float32(layer) for layer in layers], limit):
            with _only(model, layers, first, last):
                yield last / len(layers)
    finally:
        for layer, layer.weight, layer.bias in whole:
            layer.hide()


def _layers_of(model: Any) -> torch.nn.ModuleList | None:
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    found = [each for each in lists if len(each) == count]
    return found[0] if len(found) == 1 else None


def _ends_of(model: Any) -> set[torch.nn.Module]:
    return {model.get_input_embeddings(), model.get_output_embeddings()} - {None}


def _ranges(sizes: list[int], limit: int) -> Iterator[tuple[int, int]]:
    """Return ranges of layers, each as long as may be."""
    first = 0
    for index in range(1, len(sizes) + 1):
        if index == len(sizes) or sum(sizes[first : index + 1]) > limit:
            yield first, index
            first = index


@contextmanager
def _only(model: Any, layers: torch.nn.ModuleList, first: int, last: int) -> Iterator[None]:
    """Let a model have these layers alone, which are counted from 0 then, as the cache is."""
    config = model.config.get_text_config()
    facts = vars(config)
    kept = {name: value for name, value in facts.items() if _is_by_layer(value, len(layers))}
    changed = {name: value[first:last] for name, value in kept.items()}
    kept["num_hidden_layers"], changed["num_hidden_layers"] = len(layers), last - first
    chosen = torch.nn.ModuleList(list(layers)[first:last])
    owner, attribute = next(
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if child is layers
    )
    counted: list[Any] = [m for layer in chosen for m in layer.modules() if hasattr(m, "layer_idx")]
    setattr(owner, attribute, chosen)
    for module in counted:
        module.layer_idx -= first
    for name, value in changed.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        setattr(owner, attribute, layers)
        for module in counted:
            module.layer_idx += first
        for name, value in kept.items():
            setattr(config, name, value)


def _is_by_layer(value: object, count: int) -> bool:
    return isinstance(value, list) and len(value) == count
