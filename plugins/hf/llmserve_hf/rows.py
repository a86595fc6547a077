"""Rows of a batch, and the two hooks of ``generate`` that treat each row separately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from llmserve.runtime import Generation, Sampler, Tokenizer


class Row:
    """One generation in a batch, with the sampler that chooses its tokens if it needs one."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self.generation = generation
        self.sampler = None if generation.plain else Sampler(generation, tokenizer)
        self.logits: Any = None
        self.adapter = ""
        """The key of its adapter, if it has one."""

    @property
    def ids(self) -> list[int]:
        """The tokens so far, prompt and answer."""
        return self.generation.prompt_ids + self.generation.token_ids

    @property
    def tokens_left(self) -> int:
        return self.generation.max_tokens - len(self.generation.token_ids)


class RowChooser(LogitsProcessor):  # type: ignore[misc]
    """Chooses the token of each row that does not simply take the likeliest.

    ``generate`` runs greedily, so leaving only one token in a row chooses it.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, with only the chosen token left in every row that has a sampler."""
        del input_ids
        for index, row in enumerate(self._rows):
            if row.generation.done or not (row.sampler or row.generation.wants_logits):
                continue
            # A copy, because the row is overwritten below.
            logits = scores[index].float().cpu().numpy().copy()
            if row.generation.wants_logits:
                row.logits = logits
            if row.sampler:
                token = row.sampler.choose(logits)
                scores[index] = -torch.inf
                scores[index, token] = 0
        return scores


class RowFinisher(StoppingCriteria):  # type: ignore[misc]
    """Passes each row its newest token and reports to ``generate`` which rows are done."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return a flag per row."""
        del scores, kwargs
        for row, token in zip(self._rows, input_ids[:, -1].tolist(), strict=True):
            row.generation.push(token, row.logits)
        done = [row.generation.done for row in self._rows]
        return torch.tensor(done, device=input_ids.device)
