"""The algorithm of the iterative scheduling tutorial: the whole prefix again for every token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from llmserve.runtime.causal import context_length, eos_ids, load
from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Tokenizer


class Progress:
    """Nothing fails here."""

    def __init__(self) -> None:
        self.failed: list[tuple[Generation, Exception]] = []


class RecomputingGenerator:
    """A stepper without a cache, greedy only, behind the same driver as the plugin's engine."""

    waiting = cache_used = cache_tokens = 0

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._model = load(settings, folder)
        self.context_length = context_length(self._model)
        self.eos_ids = eos_ids(self._model)
        self._rows: list[Generation] = []

    def stepper(self, tokenizer: Tokenizer) -> RecomputingGenerator:
        """Return itself."""
        del tokenizer
        return self

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._rows)

    @property
    def live(self) -> int:
        """How many are under way."""
        return len(self._rows)

    def admit(self, generation: Generation) -> None:
        """Take a generation."""
        self._rows.append(generation)

    def drop(self, generation: Generation) -> None:
        """Forget a generation."""
        self._rows = [row for row in self._rows if row is not generation]

    def step(self) -> Progress:
        """Run every prefix through the model and push the next token of each."""
        prefixes = [row.prompt_ids + row.token_ids for row in self._rows]
        width = max(map(len, prefixes))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prefixes])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prefixes])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.inference_mode():
            logits = self._model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
            ).logits
        for row, token in zip(list(self._rows), logits[:, -1].argmax(-1).tolist(), strict=True):
            row.push(token)
            if row.done:
                self.drop(row)
        return Progress()
