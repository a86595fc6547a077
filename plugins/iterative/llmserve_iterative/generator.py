"""The generator: runs the engine step by step, or over whole batches with static batching."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import Engine, Generation, PromptLookup, Stepper, Tokenizer, run_batch
from llmserve.runtime.causal import context_length, eos_ids, load, try_imports

LOG = logging.getLogger(__name__)


class StepwiseGenerator:
    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._model = load(settings, folder)
        self.context_length = exact_length(self._model)
        if self.context_length != (full_length := context_length(self._model)):
            LOG.warning(
                "llmserve: note: of this model's context of %s tokens, %s are served: beyond them "
                "it treats all tokens differently, which iterative cannot do. hf serves all.",
                full_length,
                self.context_length,
            )
        self.eos_ids = eos_ids(self._model)
        self._settings = settings
        self._engine: Stepper | None = None

    # `llmserve check` calls it.
    try_imports = staticmethod(try_imports)

    def stepper(self, tokenizer: Tokenizer) -> Stepper:
        """Return the engine; it takes over the model, so there is only one."""
        if self._engine is None:
            # Imported here because a build only inspects the class and need not load torch.
            from llmserve_iterative.runner import make_runner

            max_sequences = self._settings["max_sequences"]
            context = self.context_length or 2048
            cache_tokens = self._settings["cache_tokens"]
            # Models that were built before there were guesses have none.
            lookup = self._settings.get("prompt_lookup", 0)
            self._engine = Engine(
                make_runner(
                    self._model,
                    cache_tokens or max(4 * context, max_sequences * context // 4),
                ),
                tokenizer,
                max_sequences=max_sequences,
                prefill_chunk=self._settings["prefill_chunk"],
                guesser=PromptLookup(lookup) if lookup else None,
            )
        return self._engine

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        run_batch(self.stepper(tokenizer), generations)


def exact_length(model: Any) -> int | None:
    """Return how long a sequence may be for its answer not to depend on other sequences.

    With longrope, all tokens of a pass are rotated differently once one of them, of any sequence,
    is beyond the original context. Chunked attention needs a mask, and there is none here.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    # Some models have parameters for each type of layer.
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    longropes = [rope for rope in ropes if rope.get("rope_type") == "longrope"]
    limits = [rope["original_max_position_embeddings"] for rope in longropes]
    limits += [context_length(model), getattr(config, "attention_chunk_size", None)]
    return min((limit for limit in limits if limit), default=None)
