"""Log-probabilities of tokens and of the likeliest alternatives at their positions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability, from the model's logits before any option of the request.

    ``top`` are the likeliest tokens at its position, the likeliest first, or those that the
    request has named.
    """

    token: int
    value: float
    top: tuple[Logprob, ...] = ()


def logprob_of(
    logits: npt.NDArray[Any], token: int, count: int, named: Sequence[int] = ()
) -> Logprob:
    """Return the log-probability of a token and of the ``count`` likeliest, or of the ``named``."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    if named:
        return Logprob(token, float(scores[token]), tuple(_named(scores, named)))
    count = min(count, scores.size)
    likeliest = np.argpartition(scores, -count)[-count:] if count else np.array([], dtype=int)
    likeliest = likeliest[np.lexsort((likeliest, -scores[likeliest]))]
    top = tuple(Logprob(int(other), float(scores[other])) for other in likeliest)
    return Logprob(token, float(scores[token]), top)


def _named(scores: npt.NDArray[Any], named: Sequence[int]) -> Iterator[Logprob]:
    for token in named:
        # Vocabularies may have tokens that no model has a score for.
        yield Logprob(token, float(scores[token]) if token < scores.size else -math.inf)


def to_json(logprobs: Sequence[Logprob], texts: Mapping[int, str]) -> str:
    """Return a JSON list with one entry per token."""
    return json.dumps([_entry(logprob, texts) for logprob in logprobs], separators=(",", ":"))


def _entry(logprob: Logprob, texts: Mapping[int, str]) -> dict[str, Any]:
    # JSON has no infinity; -9999 stands for an impossible token.
    value = None if math.isnan(logprob.value) else round(max(logprob.value, -9999.0), 6)
    entry = {"id": logprob.token, "token": texts[logprob.token], "logprob": value}
    return entry | ({"top": [_entry(t, texts) for t in logprob.top]} if logprob.top else {})
