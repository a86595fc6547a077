"""The engine behind the roles: stepwise for in-flight batching, whole batches for static."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import Generation, Stepper, Tokenizer, run_batch
from llmserve.runtime.causal import context_length, eos_ids, load

LOG = logging.getLogger(__name__)


class StepwiseGenerator:
    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._model = load(settings, folder)
        self.context_length = exact_length(self._model)
        if self.context_length != (whole := context_length(self._model)):
            LOG.warning(
                "llmserve: note: of this model's context of %s tokens %s are served: beyond them "
                "it reads all tokens otherwise, which iterative does not follow. hf serves all.",
                whole,
                self.context_length,
            )
        self.eos_ids = eos_ids(self._model)
        self._settings = settings
        self._engine: Stepper | None = None

    def stepper(self, tokenizer: Tokenizer) -> Stepper:
        """Return the engine; it takes the model over, so there is one."""
        if self._engine is None:
            # Here and not above: a build only looks at the class, and need not wait for torch.
            from llmserve_iterative.engine.engine import Engine

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


def exact_length(model: Any) -> int | None:
    """Return how many tokens a sequence may have for its answer to depend on nothing else.

    With longrope every token of a pass is turned another way once one of them is that far behind,
    of whichever sequence; attention in chunks is left to a mask, and there is none here.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    # Some models have one for each kind of layer.
    ropes = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    long = [one for one in ropes if one.get("rope_type") == "longrope"]
    ends = [one["original_max_position_embeddings"] for one in long]
    ends += [context_length(model), getattr(config, "attention_chunk_size", None)]
    return min((end for end in ends if end), default=None)
