"""The generator ``scaffold`` as it runs in Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from llmserve.runtime import Generation, Sampler, Tokenizer
from llmserve.runtime.causal import context_length, eos_ids, load


class ScaffoldGenerator:
    """Continues ids; a :class:`llmserve.runtime.protocols.Generator`."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._model = load(settings, folder)
        self.context_length = context_length(self._model)
        self.eos_ids = eos_ids(self._model)

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        """Push one token into each generation in turn until all are done."""
        rows = [Row(self._model, generation, tokenizer) for generation in generations]
        while rows:
            for row in rows:
                row.step()
            rows = [row for row in rows if not row.generation.done]


class Row:
    """One generation and its key-value cache."""

    def __init__(self, model: Any, generation: Generation, tokenizer: Tokenizer) -> None:
        self.generation = generation
        self._model = model
        # It implements all sampling options: temperature, penalties, seeds, bad words.
        self._sampler = Sampler(generation, tokenizer)
        self._cache: Any = None
        self._new = generation.prompt_ids

    def step(self) -> None:
        """Generate one token; the generation itself decides when it is done."""
        with torch.inference_mode():
            out = self._model(
                input_ids=torch.tensor([self._new], device=self._model.device),
                past_key_values=self._cache,
                use_cache=True,
            )
        self._cache = out.past_key_values
        logits = out.logits[0, -1].float().cpu().numpy()
        token = self._sampler.choose(logits)
        self._new = [token]
        # The logits are for requests with log-probabilities.
        self.generation.push(token, logits)
