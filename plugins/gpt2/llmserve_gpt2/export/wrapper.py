"""A model as one function of tensors: past keys and values go in, present ones come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache


class Growing(DynamicCache):  # type: ignore[misc]
    """A cache of a single pass: zeros in front, then the past, then what is new.

    The zeros bring sequences of different lengths to one length, so that they fit into one
    batch; the mask hides them. All three are put together at once, for a cache is copied with
    every token and once is enough.
    """

    def __init__(self, past: Sequence[torch.Tensor], held: int, new: int, room: int) -> None:
        super().__init__()
        self._past = past
        self._before = room - new
        self._gap = room - new - held
        self._room = room
        self.present: list[torch.Tensor] = list(past)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Give a layer everything that it may look at."""
        del args, kwargs
        at = 2 * layer_idx
        for offset, new in enumerate((key_states, value_states)):
            rows, heads, _, width = new.shape
            gap = new.new_zeros((rows, heads, self._gap, width))
            self.present[at + offset] = torch.cat([gap, self._past[at + offset], new], dim=2)
        return self.present[at], self.present[at + 1]

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Say how much stands before what is new."""
        del args, kwargs
        return self._before

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Say how much there is to look at, from where on."""
        del args, kwargs
        return self._room, 0


class Step(torch.nn.Module):
    """One pass over new tokens: the last position's logits, and the cache as it is then.

    Two inputs are there for their lengths too. ``attention_mask`` is as long as the cache will
    be and ``past_mask`` as long as it was; Triton batches only requests whose inputs have the
    same shapes, and knows nothing of the shapes of states.
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
        """Run the model on what is new."""
        cache = Growing(past, past_mask.shape[1], input_ids.shape[1], attention_mask.shape[1])
        answer = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return (answer.logits[:, -1].float(), *cache.present)
