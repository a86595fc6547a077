"""Attention as a trace has it: in the form that OpenVINO replaces by one that reads pages.

A model's own attention, of any kind, is traced as one operation for each layer, with the mask that
the model makes. The cache is kept here, and not where the model puts it: what a model derives from
its cache (such as keys from a smaller vector) is derived once for each token then, and what layers
share is there once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from llmserve.plugin import UnservedError
from llmserve_openvino.capped_attention import Cap
from llmserve_openvino.own_attention import OwnAttention, repeated
from llmserve_openvino.recurrent_layers import Recurrence

ATTENTION = "llmserve_openvino"
_HEARS = "audio_config"
"""The part of a configuration for sounds."""
_UNEQUAL = "has layers of different numbers of heads"


class Past(DynamicCache):  # type: ignore[misc]
    """The cache of a single pass: new keys and values are appended to the past ones.

    ``past`` is in the order in which layers attend; there is none in a pass that finds the shapes.
    """

    def __init__(
        self,
        past: Sequence[Tensor] = (),
        own: OwnAttention | None = None,
        recurrence: Recurrence | None = None,
    ) -> None:
        super().__init__()
        self._past = past
        self.recurrence = recurrence or Recurrence()
        self.own = own
        """How a model attends that does not call the attention here; ``update`` appends then."""
        self.present: list[Tensor] = []
        self.heads: set[int] = set()
        """How many of them layers have that attend here."""
        self.caps: list[Cap | None] = []
        """How each of those layers caps its scores."""
        self._appended: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer; those of one before, if it has passed its own."""
        for known, known_value, keys, values in self._appended:
            if known is key and known_value is value:
                return keys, values
        keys, values = key, value
        if self._past:
            past = self._past[len(self.present) :]
            keys, values = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        self.present += [keys, values]
        self._appended.append((key, value, keys, values))
        return keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        del layer_idx, args, kwargs
        if self.own is None:
            return key_states, value_states
        keys, values = self.append(key_states, value_states)
        # Some look at them as if they were in a row, as those of a usual cache are.
        keys, values = keys.contiguous(), values.contiguous()
        self.own.follow(keys, values)
        return keys, values

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        del args, kwargs
        return self._past[0].shape[2] if self._past else 0

    def get_mask_sizes(self, query_length: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        del args, kwargs
        if isinstance(query_length, Tensor) and query_length.ndim:
            query_length = query_length.shape[0]
        return self.get_seq_length() + query_length, 0

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """No layer is to look at its state: an operation does."""
        return False

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        self.recurrence.expect_convolution()
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        self.recurrence.check_scanned()
        return recurrent_states

    def update_indexer(self, *_: Any, **__: Any) -> None:
        raise UnservedError("chooses what it attends to with an index of its own")


class Attention:
    """The attention of one pass over a cache; transformers calls it for each layer."""

    def __init__(self, cache: Past) -> None:
        self._cache = cache
        AttentionInterface.register(ATTENTION, self)

    def __call__(
        self,
        _module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if position_bias is not None or attention_mask is None:
            raise UnservedError("has a mask of its own in its attention")
        self._cache.heads.add(int(query.shape[1]))
        if len(self._cache.heads) > 1:
            # OpenVINO has memory for the heads of one layer, and computes others with it.
            raise UnservedError(_UNEQUAL)
        keys, values = self._cache.append(key, value)
        count = query.shape[1] // key.shape[1]
        # A trace has none: what reads pages is told of it.
        widths = int(key.shape[3]), int(value.shape[3])
        cap = None if softcap is None else Cap(softcap, int(key.shape[1]), int(count), *widths)
        self._cache.caps.append(cap)
        keys, values = repeated(keys, count), repeated(values, count)
        sinks = getattr(_module, "sinks", None) if s_aux is None else s_aux
        if cap and sinks is not None:
            raise UnservedError("caps its attention scores beside sinks")
        if sinks is None:
            output = functional.scaled_dot_product_attention(
                query, keys, values, attention_mask, scale=scaling
            )
        else:
            output = _attend_with_sinks(query, keys, values, attention_mask, scaling, sinks)
        return output.transpose(1, 2), None


def _attend_with_sinks(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None, sinks: Tensor
) -> Tensor:
    """Attend with one more score for each head, which takes its share and adds no value."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, keys.transpose(2, 3)) * scale + mask
    own = sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
    scores = torch.cat([scores, own], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = functional.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]
    return torch.matmul(weights, values)


@contextmanager
def replaced(model: Any) -> Iterator[None]:
    """Let a model compute its attention here, if it can be told to; then with its own again."""
    Attention(Past())
    # Numbers to add, and not what may be looked at: OpenVINO finds windows only there.
    AttentionMaskInterface.register(ATTENTION, AttentionMaskInterface()["eager"])
    own = model.config._attn_implementation
    # What hears computes its attention itself alone, and no trace has it.
    parts = ["", *(name for name in model.config.sub_configs if name != _HEARS)]
    model.set_attn_implementation(dict.fromkeys(parts, ATTENTION))
    try:
        yield
    finally:
        model.set_attn_implementation(dict.fromkeys(parts, own))
