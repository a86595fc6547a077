"""The two places where ``generate`` lets every row of a batch go its own way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    StoppingCriteria,
)

from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Tokenizer
from llmserve.runtime.sampling import Sampler


class RowChooser(LogitsProcessor):  # type: ignore[misc]
    """Chooses the token of each row that does not just want the likeliest.

    ``generate`` runs greedily, so leaving one token in a row is choosing it.
    """

    def __init__(self, rows: Sequence[Generation], tokenizer: Tokenizer) -> None:
        self._choosers = [
            (index, row, Sampler(row, tokenizer))
            for index, row in enumerate(rows)
            if not row.params.plain
        ]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores with one token left in every row that was chosen for."""
        del input_ids
        for index, row, sampler in self._choosers:
            if not row.done:
                token = sampler.choose(scores[index].float().cpu().numpy())
                scores[index] = -torch.inf
                scores[index, token] = 0
        return scores


class RowFinisher(StoppingCriteria):  # type: ignore[misc]
    """Hands each row its newest token and tells ``generate`` which rows are done."""

    def __init__(self, rows: Sequence[Generation]) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return a flag per row."""
        del scores, kwargs
        for row, token in zip(self._rows, input_ids[:, -1].tolist(), strict=True):
            row.push(token)
        done = [row.done for row in self._rows]
        return torch.tensor(done, device=input_ids.device)
