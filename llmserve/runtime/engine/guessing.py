"""Guesses of the tokens that come next, of which an engine checks several in one pass.

A guess is kept if the sampler chooses the same token, so an answer is the same without guesses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol
from weakref import WeakKeyDictionary

from llmserve.runtime.answer.generation import Generation
from llmserve.runtime.engine.pages import PagePool
from llmserve.runtime.engine.runner import Chunk, Runner

# A guess is what followed the last occurrence of this many tokens.
_NGRAM = 3
# How many tokens of new prompts a draft model reads in a step.
_DRAFT_CHUNK = 512

# How much the newest step counts in what a row of a pass costs, and what a row costs as a share of
# an empty pass until that is known.
_NEWEST_WEIGHT = 0.02
_FIRST_ROW_SHARE = 1 / 16
_LEAST_ROW_SHARE, _LARGEST_ROW_SHARE = 1 / 500, 1.0
# Costs and chances are estimates: a guess must pay by this factor.
_MARGIN = 1.25
_TRIAL_INTERVAL = 64


class Guesser(Protocol):
    """Guesses the next tokens of generations; ``most`` is how many it may guess in a step."""

    most: int

    def guess(self, wanted: Mapping[Generation, int]) -> Mapping[Generation, list[int]]:
        """Return up to the wanted number of tokens for each generation, none if it knows none."""

    def drop(self, generation: Generation) -> None:
        """Forget a generation; it may come back."""


class PromptLookup:
    """Guesses what followed the same tokens earlier in the prompt or in the answer."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._places: WeakKeyDictionary[Generation, _Places] = WeakKeyDictionary()

    def guess(self, wanted: Mapping[Generation, int]) -> Mapping[Generation, list[int]]:
        guesses = {}
        for generation, count in wanted.items():
            if (places := self._places.get(generation)) is None:
                places = self._places[generation] = _Places()
            guesses[generation] = places.after_the_last_tokens(generation, count)
        return guesses

    def drop(self, generation: Generation) -> None:
        self._places.pop(generation, None)


class _Places:
    """Where every few tokens of a generation occurred last."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._next_end = _NGRAM

    def after_the_last_tokens(self, generation: Generation, count: int) -> list[int]:
        if not self._ids:
            self._ids += generation.prompt_ids
        self._ids += generation.token_ids[len(self._ids) - len(generation.prompt_ids) :]
        # The newest tokens themselves are entered when others have followed them.
        for end in range(self._next_end, len(self._ids)):
            self._ends[tuple(self._ids[end - _NGRAM : end])] = end
        self._next_end = max(_NGRAM, len(self._ids))
        place = self._ends.get(tuple(self._ids[-_NGRAM:]))
        if place is None:
            return []
        # What repeats itself goes on after the newest token as well.
        period = len(self._ids) - place
        return [self._ids[place + offset % period] for offset in range(count)]


class DraftModel:
    """Guesses with a smaller model, which has its own runner and pages.

    Beyond its ``context_length``, it guesses nothing.
    """

    def __init__(self, runner: Runner, most: int, *, context_length: int | None = None) -> None:
        self.most = most
        self._context_length = context_length
        self._runner = runner
        self._pool = PagePool(runner.page_count, runner.page_size)
        self._drafts: dict[Generation, _Draft] = {}

    def guess(self, wanted: Mapping[Generation, int]) -> Mapping[Generation, list[int]]:
        guesses: dict[Generation, list[int]] = {generation: [] for generation in wanted}
        budget = _DRAFT_CHUNK
        pending: dict[Generation, list[int]] = {}
        for generation in wanted:
            if self._is_too_long(generation):
                self.drop(generation)
                continue
            draft = self._drafts.setdefault(generation, _Draft())
            ids = draft.missing(generation)[:budget]
            if ids and self._grow(draft, len(draft.ids) + len(ids) + self.most):
                pending[generation] = ids
                budget -= len(ids)
        while pending:
            for generation, token in self._pass(pending).items():
                if self._drafts[generation].complete(generation):
                    guesses[generation].append(token)
            pending = {
                generation: guesses[generation][-1:]
                for generation in pending
                if 0 < len(guesses[generation]) < wanted[generation]
            }
        return guesses

    def drop(self, generation: Generation) -> None:
        if draft := self._drafts.pop(generation, None):
            self._pool.release(draft.pages)

    def _is_too_long(self, generation: Generation) -> bool:
        # The last guess is not computed by the draft.
        length = len(generation.prompt_ids) + len(generation.token_ids) + self.most - 1
        return self._context_length is not None and length > self._context_length

    def _pass(self, pending: Mapping[Generation, list[int]]) -> Mapping[Generation, int]:
        """Compute these tokens, and return the likeliest next one of each generation."""
        order = sorted(pending, key=lambda generation: len(pending[generation]) > 1)
        drafts = [self._drafts[generation] for generation in order]
        chunks = [
            Chunk(pending[generation], len(draft.ids), draft.pages)
            for generation, draft in zip(order, drafts, strict=True)
        ]
        likeliest = self._runner.run(chunks).likeliest()
        for generation, draft in zip(order, drafts, strict=True):
            draft.ids += pending[generation]
        return dict(zip(order, likeliest, strict=True))

    def _grow(self, draft: _Draft, length: int) -> bool:
        while len(draft.pages) < self._pool.pages_for(length):
            if (page := self._pool.take(*draft.pages[-1:])) is None:
                return False
            draft.pages.append(page)
        return True


class _Draft:
    """The tokens of a generation that a draft model has in its cache, right or wrong."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.pages: list[int] = []
        self._right = 0

    def missing(self, generation: Generation) -> list[int]:
        """Forget wrong guesses; return the tokens that are not in the cache, at least the last."""
        ids = generation.prompt_ids + generation.token_ids
        right = self._right
        while right < min(len(ids) - 1, len(self.ids)) and ids[right] == self.ids[right]:
            right += 1
        self._right = min(right, len(ids) - 1)
        del self.ids[self._right :]
        return ids[self._right :]

    def complete(self, generation: Generation) -> bool:
        return len(self.ids) >= len(generation.prompt_ids) + len(generation.token_ids)


class Price:
    """How likely a guess has to be right to pay, from what passes have taken so far.

    A pass takes a time of its own and some for each row, as a line through the measured times says.
    """

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0)
        self._weight = 0.0
        self._guessing = 0.0
        self._steps = 0

    def measured(self, rows: int, seconds: float, *, guessing: float, depth: int) -> None:
        """Count a step: its rows, and the time it took, that of up to ``depth`` guesses apart."""
        new = (rows, seconds, rows * rows, rows * seconds)
        keep = 1 - _NEWEST_WEIGHT
        self._weight = keep * self._weight + _NEWEST_WEIGHT
        old = self._sums
        self._sums = (
            keep * old[0] + _NEWEST_WEIGHT * new[0],
            keep * old[1] + _NEWEST_WEIGHT * new[1],
            keep * old[2] + _NEWEST_WEIGHT * new[2],
            keep * old[3] + _NEWEST_WEIGHT * new[3],
        )
        if depth:
            self._guessing += 0.1 * (guessing / depth - self._guessing)
        self._steps += 1

    @property
    def is_trial(self) -> bool:
        """Whether guesses are due for a try that have not paid."""
        return self._steps % _TRIAL_INTERVAL == _TRIAL_INTERVAL - 1

    def of_guess(self, sequences: int) -> float:
        """Return how likely a guess must be right while so many sequences are running."""
        share = self._row_share()
        seconds = self._sums[1] / self._weight if self._weight else math.inf
        price = sequences * share / (1 + sequences * share) + self._guessing / max(seconds, 1e-9)
        return _MARGIN * price

    def _row_share(self) -> float:
        """Return the time of a row as a share of that of a pass without rows."""
        if not self._weight:
            return _FIRST_ROW_SHARE
        rows, seconds, squares, products = (value / self._weight for value in self._sums)
        variance = squares - rows * rows
        if variance < 0.05 * rows * rows:
            return _FIRST_ROW_SHARE
        slope = (products - rows * seconds) / variance
        base = seconds - slope * rows
        if slope <= 0:
            return _LEAST_ROW_SHARE
        share = slope / base if base > 0 else _LARGEST_ROW_SHARE
        return min(max(share, _LEAST_ROW_SHARE), _LARGEST_ROW_SHARE)


class Chance:
    """How often the guesses of one sequence were right lately."""

    def __init__(self) -> None:
        self._share = 0.5

    def checked(self, guesses: int, right: int) -> None:
        """Count the guesses of a step; after the first wrong one, none was checked."""
        for hit in [True] * right + [False] * (right < guesses):
            self._share += 0.15 * (hit - self._share)

    def depth(self, price: float, most: int) -> int:
        """Return how many guesses in a row pay: each is right only if those before it are."""
        if self._share <= 0 or price >= 1:
            return 0
        if self._share >= 0.99:
            return most
        return min(most, int(math.log(price) / math.log(self._share)))
