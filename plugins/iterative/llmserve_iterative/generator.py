"""The engine behind the roles: stepwise for in-flight batching, whole batches for static."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime.causal import context_length, eos_ids, load
from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Tokenizer
from llmserve_iterative.engine import Engine


class StepwiseGenerator:
    """The runtime of the generator ``stepwise``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._model = load(settings, folder)
        self.context_length = context_length(self._model)
        self.eos_ids = eos_ids(self._model)
        self._settings = settings
        self._engine: Engine | None = None

    def stepper(self, tokenizer: Tokenizer) -> Engine:
        """Return the engine; it takes the model over, so there is one."""
        if self._engine is None:
            self._engine = Engine(
                self._model,
                tokenizer,
                max_sequences=self._settings["max_sequences"],
                cache_tokens=self._cache_tokens(),
                prefill_chunk=self._settings["prefill_chunk"],
            )
        return self._engine

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        """Run one batch until every row is done."""
        engine = self.stepper(tokenizer)
        try:
            for generation in generations:
                engine.admit(generation)
            while engine.busy:
                for _, error in engine.step().failed:
                    raise error
        finally:
            for generation in generations:
                engine.drop(generation)

    def _cache_tokens(self) -> int:
        asked: int = self._settings["cache_tokens"]
        context = self.context_length or 2048
        return asked or max(4 * context, self._settings["max_sequences"] * context // 4)
