"""What must be known of a model to feed its graph: found by running it, not by its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache


@dataclass(frozen=True)
class Shape:
    """The cache of one model, and the limits of its sequences."""

    layers: int
    heads: int
    key_width: int
    value_width: int
    vocabulary: int
    context: int | None
    weights: int

    @property
    def slot(self) -> int:
        """How many numbers the cache holds for one token."""
        return self.layers * self.heads * (self.key_width + self.value_width)

    def width(self, state: int) -> int:
        """Return the width of a state: keys and values take turns."""
        return self.value_width if state % 2 else self.key_width

    def empty(self, rows: int, length: int) -> list[torch.Tensor]:
        """Return a cache of zeros."""
        return [
            torch.zeros((rows, self.heads, length, self.width(state)))
            for state in range(2 * self.layers)
        ]


def shape_of(model: Any) -> Shape:
    """Run two tokens through a model and look at the cache that it fills.

    Raises :class:`ValueError` with the reason where that cache is not one of plain keys and
    values.
    """
    cache = DynamicCache()
    with torch.inference_mode():
        ids = torch.tensor([[0, 1]])
        mask = torch.ones_like(ids)
        answer = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    layers = [
        (getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers
    ]
    plain = all(
        isinstance(keys, torch.Tensor) and keys.ndim == 4 and keys.shape[2] == 2
        for pair in layers
        for keys in pair
    )
    if not layers or not plain:
        raise ValueError("it keeps something else than keys and values of every token")
    tensors: list[tuple[Any, Any]] = list(layers)
    shapes = {(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in tensors}
    if len(shapes) > 1:
        raise ValueError("its layers have caches of different shapes")
    ((heads, key_width, value_width),) = shapes
    config = model.config.get_text_config()
    logits: Any = answer.logits
    return Shape(
        layers=len(layers),
        heads=heads,
        key_width=key_width,
        value_width=value_width,
        vocabulary=logits.shape[-1],
        context=getattr(config, "max_position_embeddings", None),
        weights=sum(parameter.numel() for parameter in model.parameters()),
    )
