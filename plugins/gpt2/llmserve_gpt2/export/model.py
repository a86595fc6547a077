"""Wraps a model as one function of tensors, and describes the shapes of its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache


class GrowingCache(DynamicCache):  # type: ignore[misc]
    """The cache of a single pass: zeros, followed by the past tokens and the new ones.

    The zeros bring sequences of different lengths to one length, so that they fit into one batch;
    the mask hides them. The three parts are concatenated in a single operation, because each
    concatenation copies the whole cache.
    """

    def __init__(self, past: Sequence[torch.Tensor], old: int, new: int, length: int) -> None:
        super().__init__()
        self._past = past
        self._before = length - new
        self._gap = length - new - old
        self._length = length
        self.present: list[torch.Tensor] = list(past)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return all keys and values of a layer."""
        del args, kwargs
        index = 2 * layer_idx
        for offset, new in enumerate((key_states, value_states)):
            rows, heads, _, width = new.shape
            gap = new.new_zeros((rows, heads, self._gap, width))
            self.present[index + offset] = torch.cat([gap, self._past[index + offset], new], dim=2)
        return self.present[index], self.present[index + 1]

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        del args, kwargs
        return self._before

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        del args, kwargs
        return self._length, 0


class Step(torch.nn.Module):
    """One pass over new tokens; returns the last position's logits and the updated cache.

    The lengths of two inputs matter as well: ``attention_mask`` has the length of the cache after
    the pass and ``past_mask`` its length before. Triton batches only requests whose inputs have
    the same shapes, and ignores the shapes of states.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        past_mask: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        cache = GrowingCache(past, past_mask.shape[1], input_ids.shape[1], attention_mask.shape[1])
        answer = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return (answer.logits[:, -1].float(), *cache.present)


@dataclass(frozen=True)
class Shape:
    """The shapes of a model's cache, and the limits of its sequences."""

    layers: int
    heads: int
    key_width: int
    value_width: int
    vocabulary: int
    context: int | None
    weights: int

    @property
    def slot(self) -> int:
        return self.layers * self.heads * (self.key_width + self.value_width)

    def width(self, state: int) -> int:
        """Return the width of a state; keys and values alternate."""
        return self.value_width if state % 2 else self.key_width

    def empty(self, rows: int, length: int) -> list[torch.Tensor]:
        return [
            torch.zeros((rows, self.heads, length, self.width(state)))
            for state in range(2 * self.layers)
        ]


def shape_of(model: Any) -> Shape:
    """Run two tokens through a model and inspect the cache that it fills.

    Raises :class:`ValueError` with the reason if the cache is not one of plain keys and values.
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
        raise ValueError("its cache does not consist of the keys and values of every token")
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


_ROWS, _NEW, _PAST, _LENGTH = 2, 3, 5, 11


def example(shape: Shape) -> tuple[torch.Tensor, ...]:
    """Return arguments of a step: two rows, three new tokens, five past slots, a gap of three."""
    ids = torch.arange(_ROWS * _NEW).reshape(_ROWS, _NEW) % shape.vocabulary
    positions = torch.arange(_NEW).repeat(_ROWS, 1) + torch.tensor([[2], [1]])
    mask = torch.zeros((_ROWS, _LENGTH), dtype=torch.int64)
    for row, past_tokens in enumerate((2, 1)):
        mask[row, _LENGTH - _NEW - past_tokens :] = 1
    past_mask = torch.zeros((_ROWS, _PAST), dtype=torch.int64)
    return ids, positions, mask, past_mask, *shape.empty(_ROWS, _PAST)
