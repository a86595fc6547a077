"""How likely the model held a token, and which others it held likely at its place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MOST = 20
"""How many other tokens may be asked for at each place."""


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability, by the model's own logits before any option of the request.

    ``top`` are the likeliest tokens at its place, the likeliest first.
    """

    token: int
    value: float
    top: tuple[Logprob, ...] = ()


def logprob_of(logits: npt.NDArray[Any], token: int, count: int) -> Logprob:
    """Return the log-probability of a token and of the ``count`` likeliest."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    count = min(count, scores.size)
    likeliest = np.argpartition(scores, -count)[-count:] if count else np.array([], dtype=int)
    likeliest = likeliest[np.lexsort((likeliest, -scores[likeliest]))]
    top = tuple(Logprob(int(other), float(scores[other])) for other in likeliest)
    return Logprob(token, float(scores[token]), top)


def to_json(logprobs: Sequence[Logprob], texts: Mapping[int, str]) -> str:
    """Write them down, one entry per token."""
    return json.dumps([_entry(one, texts) for one in logprobs], separators=(",", ":"))


def _entry(one: Logprob, texts: Mapping[int, str]) -> dict[str, Any]:
    # JSON has no infinity; what was impossible is as good as that.
    value = None if math.isnan(one.value) else round(max(one.value, -9999.0), 6)
    entry = {"id": one.token, "token": texts[one.token], "logprob": value}
    return entry | ({"top": [_entry(other, texts) for other in one.top]} if one.top else {})
