"""The fast way: all tokens of a pass in one row, each attending to its own sequence.

Everything in a decoder but attention treats tokens one by one, so sequences of any lengths
need no padding: the model's own code runs over one long row, and its attention is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface

from llmserve_iterative.engine.attention import Plan
from llmserve_iterative.engine.buckets import bucket
from llmserve_iterative.engine.cache import StepCache
from llmserve_iterative.engine.kernels import Kernels
from llmserve_iterative.engine.span import Span
from llmserve_iterative.engine.store import Places, Store
from llmserve_iterative.engine.tapes import Tapes

NAME = "llmserve_flat"


class Row:
    """All tokens of a pass, one behind the other; a layout of the cache.

    Blanks fill it up to a size that passes are made for. Nothing is written for them.
    """

    past = 0

    def __init__(self, spans: Sequence[Span], store: Store, device: torch.device) -> None:
        self._store = store
        ids = [token for span in spans for token in span.ids]
        positions = [position for span in spans for position in range(span.start, span.stop)]
        extents = [span.extent for span in spans for _ in span.ids]
        self._count = len(ids)
        self.width = bucket(len(ids))
        blank = [0] * (self.width - len(ids))
        self.numbers = torch.tensor([[ids + blank], [positions + blank]], device=device)
        self.ids, self.positions = self.numbers
        self._places = Places(extents, positions, device)
        self.table = self._places.table

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values and return the whole layer, for attention to choose."""
        written = keys[0][:, : self._count], values[0][:, : self._count]
        return self._store.write(layer, self._places, *written)


class FlatRunner:
    """Runs all spans in one pass of the model, with attention per sequence."""

    way = "flat"

    def __init__(self, model: Any, places: int, kernels: Kernels | None = None) -> None:
        AttentionInterface.register(NAME, _attend)
        model.set_attn_implementation(NAME)
        self._model = model
        for module in model.modules():
            if hasattr(module, "warn_if_padding_and_no_attention_mask"):
                # There is no padding, and to look for it takes a look at the numbers of each pass.
                module.warn_if_padding_and_no_attention_mask = _say_nothing
        # PyTorch's attention in half precision is several times slower on a CPU than in single.
        cpu = model.device.type == "cpu"
        self._dtype = torch.float32 if cpu else model.dtype
        self._kernels = kernels
        self._store = Store(places, model.dtype if kernels else self._dtype, kernels)
        self._layers = model.config.get_text_config().num_hidden_layers
        self.copy = self._store.copy
        self.tapes = Tapes()

    @torch.inference_mode()
    def run(self, spans: Sequence[Span]) -> torch.Tensor:
        """Return the logits after the last token of each span."""
        # Single tokens first and by place, so that neighbours in the cache are read together.
        order = sorted(range(len(spans)), key=lambda i: (len(spans[i].ids) > 1, spans[i].extent))
        ordered = [spans[index] for index in order]
        found = self._compute(ordered)
        logits = torch.empty_like(found)
        logits[order] = found
        return logits

    def _compute(self, spans: Sequence[Span]) -> torch.Tensor:
        """Return the logits of spans in the order in which they are computed."""
        device = self._model.device
        row = Row(spans, self._store, device)
        if self._kernels is None or len(spans[-1].ids) > 1:
            return self._code(spans, row)
        inputs = row.numbers, row.table
        logits = self.tapes.play(len(spans), inputs)
        if logits is None:
            logits = self.tapes.run(len(spans), inputs, lambda: self._code(spans, row))
        return logits

    def _code(self, spans: Sequence[Span], row: Row) -> torch.Tensor:
        """Run the model's own code."""
        device = self._model.device
        kernels = (self._kernels, row.table) if self._kernels else None
        plan = Plan(spans, self._store.places, self._dtype, device, kernels)
        output = self._model(
            input_ids=row.ids,
            position_ids=row.positions,
            past_key_values=StepCache(row, self._layers),
            use_cache=True,
            logits_to_keep=plan.last,
            llmserve_plan=plan,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def _say_nothing(*_: Any) -> None:
    """Stand in for a warning that does not apply."""


def _attend(
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    llmserve_plan: Plan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer."""
    if s_aux is not None or position_bias is not None or attention_mask is not None:
        raise NotImplementedError("attention with sinks, biases or a mask of its own")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    seen = llmserve_plan.attend(query[0], key, value, scale, sliding_window, softcap)
    return seen[None], None
