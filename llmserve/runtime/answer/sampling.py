"""Chooses the next token from a row of logits, according to the request's parameters.

Each request has its own random number generator, so that the same seed gives the same text
whatever else is in the batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime.answer.generation import Generation
from llmserve.runtime.answer.params import Params
from llmserve.runtime.errors import RequestError
from llmserve.runtime.protocols import Tokenizer

Row = npt.NDArray[Any]

# The tokens of top_p are searched for among this many of the likeliest before all are sorted.
_FEW = 512


class Sampler:
    """Chooses the tokens of one generation; the tokenizer is needed for its bad words.

    For a generation that already has tokens, it continues as the previous sampler would have.
    """

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._params: Params = generation.params
        # A word has different tokens at the beginning of a text and after a space.
        forms = [form for word in self._params.bad_words for form in (word, f" {word}")]
        self._bad_ids = [ids for form in forms if (ids := tokenizer.encode(form, special=False))]
        self._biased = np.array(list(self._params.logit_bias), dtype=np.int64)
        self._biases = np.array(list(self._params.logit_bias.values()))
        seed = self._params.seed
        # Philox accepts any 64-bit seed and gives the same numbers on every machine.
        self._random = np.random.Generator(
            np.random.Philox(secrets.randbits(64) if seed is None else seed)
        )
        # Each token has consumed one number.
        self._random.random(len(generation.token_ids))

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next whatever the scores, as if each had been chosen."""
        tokens = self._generation.forced()
        self._random.random(len(tokens))
        return tokens

    def choose(self, logits: Row) -> int:
        """Return the next token, given a score for each token of the vocabulary."""
        if type(logits) is not np.ndarray or logits.ndim != 1 or logits.dtype.kind not in "fiu":
            raise TypeError(
                f"Sampler.choose takes a numpy array of scores, not {_described(logits)}"
            )
        if forced := self._generation.forced():
            self._random.random()
            return forced[0]
        # In double precision, no penalty or temperature makes a score overflow.
        scores = logits.astype(np.float64)
        self._penalize(scores)
        if self._biased.size:
            valid = self._biased < scores.size
            scores[self._biased[valid]] += self._biases[valid]
        self._forbid(scores)
        self._generation.constrain(scores)
        params = self._params
        number = self._random.random()
        likeliest = int(scores.argmax())
        if scores[likeliest] == -np.inf:
            raise RequestError(
                "no token may come next: the request rules out every token",
                code="conflicting_options",
            )
        if params.greedy:
            return likeliest
        scaled = (scores - scores[likeliest]) / params.effective_temperature
        return _draw(scaled, params, number)

    def _penalize(self, scores: Row) -> None:
        params, generation = self._params, self._generation
        if params.repetition_penalty != 1:
            seen = np.unique([*generation.prompt_ids, *generation.token_ids])
            previous = scores[seen]
            factor = params.repetition_penalty
            scores[seen] = np.where(previous < 0, previous * factor, previous / factor)
        if (params.presence_penalty or params.frequency_penalty) and generation.token_ids:
            ids, counts = np.unique(generation.token_ids, return_counts=True)
            scores[ids] -= params.presence_penalty + params.frequency_penalty * counts

    def _forbid(self, scores: Row) -> None:
        generation = self._generation
        if len(generation.token_ids) < self._params.min_tokens:
            # A request may name an end token that the model does not have.
            scores[[token for token in generation.eos_ids if token < scores.size]] = -np.inf
        for ids in self._bad_ids:
            prefix = len(ids) - 1
            if not prefix or generation.token_ids[-prefix:] == ids[:-1]:
                scores[ids[-1]] = -np.inf


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"one of shape {list(value.shape)} and type {value.dtype}"
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _draw(scores: Row, params: Params, number: float) -> int:
    """Draw a token with a random number from 0 to 1; the highest score is 0.

    Tokens are ordered by id. If ordered by likelihood, two almost equally likely tokens could swap
    places with the last digit of a score, and the same number would choose the other token.
    """
    ids = None
    if 0 < params.top_k < scores.size:
        ids = np.sort(np.argpartition(scores, -params.top_k)[-params.top_k :])
    weights = np.exp(scores if ids is None else scores[ids])
    if params.min_p > 0:
        ids, weights = _select(ids, weights, np.flatnonzero(weights >= params.min_p))
    if params.top_p < 1:
        ids, weights = _select(ids, weights, nucleus(weights, params.top_p))
    sums = np.cumsum(weights)
    index = min(int(np.searchsorted(sums, number * sums[-1], side="right")), sums.size - 1)
    return index if ids is None else int(ids[index])


def _select(ids: Row | None, weights: Row, places: Row) -> tuple[Row, Row]:
    return places if ids is None else ids[places], weights[places]


def nucleus(weights: Row, top_p: float) -> Row:
    """Return the sorted places of the fewest weights, at least one, whose share reaches top_p."""
    enough = top_p * weights.sum()
    # All weights below this threshold together make up less than the remaining share.
    places = np.flatnonzero(weights >= (1 - top_p) * weights.sum() / weights.size)
    if places.size > _FEW:
        likeliest = np.sort(places[np.argpartition(weights[places], -_FEW)[-_FEW:]])
        if weights[likeliest].sum() >= enough:
            places = likeliest
    places = places[np.argsort(-weights[places], kind="stable")]
    count = int(np.searchsorted(np.cumsum(weights[places]), enough)) + 1
    return np.sort(places[:count])
