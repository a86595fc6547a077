"""The engine behind the roles: stepwise for in-flight batching, whole batches for static."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import Generation, Tokenizer, run_batch
from llmserve.runtime.causal import context_length, eos_ids, load
from llmserve_iterative.engine.engine import Engine


class StepwiseGenerator:
    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._model = load(settings, folder)
        self.context_length = context_length(self._model)
        self.eos_ids = eos_ids(self._model)
        self._settings = settings
        self._engine: Engine | None = None

    def stepper(self, tokenizer: Tokenizer) -> Engine:
        """Return the engine; it takes the model over, so there is one."""
        if self._engine is None:
            sequences = self._settings["max_sequences"]
            context = self.context_length or 2048
            self._engine = Engine(
                self._model,
                tokenizer,
                max_sequences=sequences,
                cache_tokens=self._settings["cache_tokens"]
                or max(4 * context, sequences * context // 4),
                prefill_chunk=self._settings["prefill_chunk"],
            )
        return self._engine

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        run_batch(self.stepper(tokenizer), generations)
