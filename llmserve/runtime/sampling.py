"""The next token from one row of logits, as that row's request asks for it.

The random numbers come from a generator of the request's own, so that the same seed gives
the same text whatever else is in the batch.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime.generation import Generation
from llmserve.runtime.params import Params
from llmserve.runtime.protocols import Tokenizer

Row = npt.NDArray[Any]

# Below this the likeliest token is all that is left of a distribution.
_COLD = 1e-5


class Sampler:
    """Chooses tokens for one generation; the tokenizer tells what its bad words look like."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._params: Params = generation.params
        # A word looks different at the beginning of a text and after a space.
        forms = [form for word in self._params.bad_words for form in (word, f" {word}")]
        self._bad_ids = [ids for form in forms if (ids := tokenizer.encode(form, special=False))]
        seed = self._params.seed
        # Philox takes any 64-bit seed and gives the same numbers on every machine.
        self._random = np.random.Generator(
            np.random.Philox(secrets.randbits(64) if seed is None else seed)
        )

    def choose(self, logits: Row) -> int:
        """Return the next token's id."""
        # In double precision no penalty and no temperature makes a score overflow.
        scores = logits.astype(np.float64)
        self._penalise(scores)
        self._forbid(scores)
        params = self._params
        if params.heat < _COLD or params.top_k == 1:
            return int(scores.argmax())
        return self._draw((scores - scores.max()) / params.heat)

    def _penalise(self, scores: Row) -> None:
        params, generation = self._params, self._generation
        if params.repetition_penalty != 1:
            seen = np.unique([*generation.prompt_ids, *generation.token_ids])
            old = scores[seen]
            factor = params.repetition_penalty
            scores[seen] = np.where(old < 0, old * factor, old / factor)
        if (params.presence_penalty or params.frequency_penalty) and generation.token_ids:
            ids, counts = np.unique(generation.token_ids, return_counts=True)
            scores[ids] -= params.presence_penalty + params.frequency_penalty * counts

    def _forbid(self, scores: Row) -> None:
        generation = self._generation
        if len(generation.token_ids) < self._params.min_tokens:
            # A request may name an end that the model has no token for.
            scores[[token for token in generation.eos_ids if token < scores.size]] = -np.inf
        for ids in self._bad_ids:
            begun = len(ids) - 1
            if not begun or generation.token_ids[-begun:] == ids[:-1]:
                scores[ids[-1]] = -np.inf

    def _draw(self, scores: Row) -> int:
        params = self._params
        if 0 < params.top_k < scores.size:
            ids = np.argpartition(scores, -params.top_k)[-params.top_k :]
        else:
            ids = np.arange(scores.size)
        # A fixed order, likeliest first, makes the draw independent of how the ids were found.
        ids = ids[np.lexsort((ids, -scores[ids]))]
        weights = np.exp(scores[ids])
        weights /= weights.sum()
        if params.min_p > 0:
            weights = weights[weights >= params.min_p * weights[0]]
        sums = np.cumsum(weights)
        if params.top_p < 1:
            # The smallest set whose probability reaches top_p, and at least one.
            sums = sums[: int(np.searchsorted(sums, params.top_p * sums[-1])) + 1]
        drawn = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        return int(ids[min(drawn, sums.size - 1)])
