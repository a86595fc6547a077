"""The way that serves any model: its own attention over rows padded to one length.

Rows are padded on the left, as ``generate`` pads a batch, so that whatever a model makes of
distances (windows, biases) is right. The price is a copy of the cache in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from llmserve_iterative.engine.cache import StepCache
from llmserve_iterative.engine.span import Span
from llmserve_iterative.engine.store import Places, Store


class Rows:
    """Spans of one length as the rows of a batch; a layout of the cache."""

    def __init__(self, spans: Sequence[Span], store: Store, device: torch.device) -> None:
        self._store = store
        self.width = max(span.stop for span in spans)
        self.past = self.width - (spans[0].stop - spans[0].start)
        positions = [range(span.stop - self.width, span.stop) for span in spans]
        self.ids = torch.tensor([span.ids for span in spans], device=device)
        self.positions = torch.tensor([row[self.past :] for row in positions], device=device)
        self.mask = torch.tensor([[int(p >= 0) for p in row] for row in positions], device=device)
        self._seen = _places(spans, positions, device)
        self._written = _places(spans, [row[self.past :] for row in positions], device)

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values and gather all of each row."""
        whole = self._store.write(layer, self._written, _flat(keys), _flat(values))
        rows, heads = keys.shape[:2]
        first, second = (
            tensor.index_select(0, self._seen.rows(heads))
            .view(heads, rows, self.width, -1)
            .transpose(0, 1)
            for tensor in whole
        )
        return first, second


def _places(spans: Sequence[Span], rows: Sequence[range], device: torch.device) -> Places:
    extents = [span.extent for span, row in zip(spans, rows, strict=True) for _ in row]
    return Places(extents, [max(0, position) for row in rows for position in row], device)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Turn ``[rows, heads, tokens, width]`` into ``[heads, all tokens, width]``."""
    return tensor.transpose(0, 1).flatten(1, 2)


class PaddedRunner:
    """Runs spans through the model's own forward pass, those of equal length together."""

    way = "padded"

    def __init__(self, model: Any, places: int) -> None:
        self._model = model
        self._store = Store(places, model.dtype)
        self._layers = model.config.get_text_config().num_hidden_layers
        self.copy = self._store.copy

    @torch.inference_mode()
    def run(self, spans: Sequence[Span]) -> torch.Tensor:
        """Return the logits after the last token of each span."""
        groups: dict[int, list[int]] = {}
        for index, span in enumerate(spans):
            # A span of several tokens goes alone: padding would put it beside the others' ends.
            groups.setdefault(-index - 1 if len(span.ids) > 1 else 1, []).append(index)
        logits: dict[int, torch.Tensor] = {}
        for indices in groups.values():
            rows = self._forward([spans[index] for index in indices])
            logits.update(zip(indices, rows, strict=True))
        return torch.stack([logits[index] for index in range(len(spans))])

    def _forward(self, spans: Sequence[Span]) -> torch.Tensor:
        rows = Rows(spans, self._store, self._model.device)
        output = self._model(
            input_ids=rows.ids,
            attention_mask=rows.mask,
            position_ids=rows.positions,
            past_key_values=StepCache(rows, self._layers),
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits
