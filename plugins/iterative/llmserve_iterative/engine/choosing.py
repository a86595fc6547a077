"""From logits to tokens: the likeliest for all who want just that, a draw for the others."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several
from typing import Any

import numpy.typing as npt
import torch

from llmserve.runtime.generation import Generation
from llmserve_iterative.engine.sequence import Sequence

Failures = list[tuple[Generation, Exception]]
Choice = tuple[Sequence, int, "npt.NDArray[Any] | None"]
"""A sequence's next token, with the logits if the sequence wants to know them."""


def choose(
    sequences: Several[Sequence], logits: torch.Tensor, rows: Several[int], failures: Failures
) -> Iterator[Choice]:
    """Yield the next token of each sequence, whose logits are in its row."""
    if not sequences:
        return
    likeliest = _likeliest(logits)
    for sequence, row in zip(sequences, rows, strict=True):
        wanted = sequence.generation.wants_logits
        if sequence.sampler is None and not wanted:
            yield sequence, likeliest[row], None
            continue
        own = logits[row].float().cpu().numpy()
        if sequence.sampler is None:
            yield sequence, likeliest[row], own
            continue
        try:
            token = sequence.sampler.choose(own)
        except Exception as error:
            failures.append((sequence.generation, error))
        else:
            yield sequence, token, own if wanted else None


def _likeliest(logits: torch.Tensor) -> list[int]:
    if logits.is_cuda:
        return [int(token) for token in logits.argmax(dim=-1).tolist()]
    # Several times quicker than PyTorch's own on a CPU.
    return [int(token) for token in logits.float().numpy().argmax(axis=-1)]
