"""The generator ``scaffold`` as it runs in Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from llmserve.runtime import Generation, Progress, Sampler, Tokenizer, run_batch
from llmserve.runtime.causal import context_length, eos_ids, load


class ScaffoldGenerator:
    """Continues ids; a :class:`llmserve.runtime.protocols.SteppingGenerator`."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._model = load(settings, folder)
        self.context_length = context_length(self._model)
        self.eos_ids = eos_ids(self._model)

    def stepper(self, tokenizer: Tokenizer) -> Steps:
        """Return what a driver steps: it decides when, and which requests take part."""
        return Steps(self._model, tokenizer)

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        """Run whole batches, for drivers that do not step."""
        run_batch(self.stepper(tokenizer), generations)


class Steps:
    """The generations that are running; a :class:`llmserve.runtime.protocols.Stepper`."""

    # A generator that keeps one cache for all of them reports its size here; this one cannot run
    # out of space, so no generation waits.
    waiting = cache_tokens = 0

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._rows: dict[Generation, Row] = {}

    @property
    def busy(self) -> bool:
        return bool(self._rows)

    @property
    def live(self) -> int:
        return len(self._rows)

    @property
    def cache_used(self) -> int:
        return sum(len(g.prompt_ids) + len(g.token_ids) for g in self._rows)

    def admit(self, generation: Generation) -> None:
        """Accept a generation; one that was dropped continues after its last token."""
        self._rows[generation] = Row(self._model, generation, self._tokenizer)

    def step(self) -> Progress:
        """Push one token into each generation; one that fails does not affect the others."""
        progress = Progress()
        for generation, row in list(self._rows.items()):
            try:
                row.step()
            except Exception as error:
                progress.failed.append((generation, error))
                self.drop(generation)
            if generation.done:
                self.drop(generation)
        return progress

    def drop(self, generation: Generation) -> None:
        self._rows.pop(generation, None)


class Row:
    """One generation and its key-value cache."""

    def __init__(self, model: Any, generation: Generation, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._model = model
        # It implements all sampling options: temperature, penalties, seeds, bad words.
        self._sampler = Sampler(generation, tokenizer)
        self._cache: Any = None
        self._new = [*generation.prompt_ids, *generation.token_ids]

    def step(self) -> None:
        """Generate one token; the generation itself decides when it is done."""
        # A real engine runs its network once for all rows.
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
        self._generation.push(token, logits)
