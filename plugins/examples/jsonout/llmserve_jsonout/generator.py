"""transformers' ``generate`` with rows that can be held to JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from llmserve.runtime.causal import context_length, eos_ids, load
from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Tokenizer
from llmserve.runtime.sampling import Sampler
from llmserve_jsonout.constraint import JsonConstraint, Pieces

_FORMATS = ("text", "json_object")


class Row:
    """One generation in a batch: what chooses its tokens, and what it is held to."""

    def __init__(
        self, generation: Generation, tokenizer: Tokenizer, constraint: JsonConstraint | None
    ) -> None:
        self.generation = generation
        self.constraint = constraint
        # A constraint works on scores, so even the likeliest token is chosen by hand then.
        plain = generation.params.plain and constraint is None
        self._sampler = None if plain else Sampler(generation, tokenizer)

    @property
    def ids(self) -> list[int]:
        """The tokens so far, prompt and answer."""
        return self.generation.prompt_ids + self.generation.token_ids

    def choose(self, scores: torch.Tensor) -> None:
        """Leave one token in a row of scores, unless the likeliest will do."""
        if self._sampler is None or self.generation.done:
            return
        logits = scores.float().cpu().numpy()
        if self.constraint:
            self.constraint.mask(logits)
        token = self._sampler.choose(logits)
        if self.constraint:
            self.constraint.take(token)
        scores[:] = -torch.inf
        scores[token] = 0


class Chooser(LogitsProcessor):  # type: ignore[misc]
    """Where ``generate`` asks what may come."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores with one token left in every row that was chosen for."""
        del input_ids
        for row, of_row in zip(self._rows, scores, strict=True):
            row.choose(of_row)
        return scores


class Finisher(StoppingCriteria):  # type: ignore[misc]
    """Where ``generate`` asks who is done."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Hand each row its newest token and return a flag per row."""
        del scores, kwargs
        for row, token in zip(self._rows, input_ids[:, -1].tolist(), strict=True):
            row.generation.push(token)
        done = [row.generation.done for row in self._rows]
        return torch.tensor(done, device=input_ids.device)


class JsonGenerator:
    """The runtime of the generator ``json-transformers``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._model = load(settings, folder)
        self.context_length = context_length(self._model)
        self.eos_ids = eos_ids(self._model)
        # When a row ends, and what is sampled, is for its request to say.
        self._model.generation_config = GenerationConfig(pad_token_id=0)
        self._pieces: Pieces | None = None

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        """Run one batch until every row is done."""
        rows = [Row(g, tokenizer, self._constraint(g, tokenizer)) for g in generations]
        while rows:
            self._run(rows)
            rows = [row for row in rows if not row.generation.done]

    def _constraint(self, generation: Generation, tokenizer: Tokenizer) -> JsonConstraint | None:
        asked = generation.params.extra.get("response_format", "text")
        if asked not in _FORMATS:
            raise RequestError(f"response_format is one of {', '.join(_FORMATS)}, not {asked!r}")
        if asked == "text":
            return None
        if self._pieces is None:
            # Only now: a vocabulary of 150,000 takes a second.
            anchor = tokenizer.encode("a", special=False)[-1]
            size = self._model.get_output_embeddings().weight.shape[0]
            self._pieces = Pieces(tokenizer.decode, anchor, size)
        return JsonConstraint(generation, self._pieces)

    def _run(self, rows: Sequence[Row]) -> None:
        lengths = [len(row.ids) for row in rows]
        wanted = max(row.generation.max_tokens - len(row.generation.token_ids) for row in rows)
        if self.context_length is not None:
            # A row that is done goes along; who needs more than its context has runs on without.
            wanted = min(wanted, self.context_length - max(lengths))
        width = max(lengths)
        ids = [[0] * (width - len(row.ids)) + row.ids for row in rows]
        mask = [[0] * (width - length) + [1] * length for length in lengths]
        device = self._model.device
        with torch.inference_mode():
            self._model.generate(
                input_ids=torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=wanted,
                do_sample=False,
                logits_processor=[Chooser(rows)],
                stopping_criteria=[Finisher(rows)],
            )
