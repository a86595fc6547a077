"""One generation held to JSON: which of the likely tokens may come next."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime import Generation, RequestError, Tokenizer
from llmserve_jsonout.grammar import BEGIN

Row = npt.NDArray[Any]

# So many tokens that fit are enough to choose from; most of the likeliest fit.
_ENOUGH = 40
_FIRST_LOOK = 512
# What the shortest way to an end is made of. Each of these has to be a token by itself.
_NEEDED = '{}[]":0'
# Wishes that can forbid the only token that fits, or end an answer in the middle.
_CONTRARY = ("ignore_eos", "min_tokens", "bad_words", "stop_words")


class Pieces:
    """The text of each token, as it stands within a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._anchor = tokenizer.encode("a", special=False)[-1]
        self._before = self._decode([self._anchor])
        # Only tokens that were likely somewhere are ever looked at, of a vocabulary of 150,000.
        self._texts: dict[int, str] = {}
        missing = [one for one in _NEEDED if not self._is_token(one, tokenizer)]
        if missing:
            raise RequestError(
                f"this model cannot keep to JSON: it has no token for {' '.join(missing)}"
            )

    def text(self, token: int) -> str:
        """Return what a token adds to a text; nothing if it is half a character."""
        if token not in self._texts:
            # By itself a token can lose its leading space, so it is decoded behind another.
            text = self._decode([self._anchor, token])
            fits = text.startswith(self._before) and "\ufffd" not in text
            self._texts[token] = text[len(self._before) :] if fits else ""
        return self._texts[token]

    def _is_token(self, character: str, tokenizer: Tokenizer) -> bool:
        """Whether a character is a token by itself, behind one that it does not merge with."""
        written = (tokenizer.encode(before + character, special=False) for before in ("a", "0", ""))
        return any(ids and self.text(ids[-1]) == character for ids in written)


class JsonConstraint:
    """Lets a generation write one JSON object that is complete before its last token."""

    def __init__(self, generation: Generation, pieces: Pieces) -> None:
        for name in _CONTRARY:
            if getattr(generation.params, name):
                raise RequestError(f"a JSON object cannot go with {name}: leave it out")
        if not generation.eos_ids:
            raise RequestError("this model has no token that ends an answer, so JSON has no end")
        # One token is for the end itself.
        if generation.max_tokens < BEGIN.shortest + 1:
            raise RequestError(f"a JSON object takes max_tokens of at least {BEGIN.shortest + 1}")
        self._generation = generation
        self._pieces = pieces
        self._state = BEGIN
        self._read = 0

    def __call__(self, scores: Row) -> None:
        """Take out of a row of scores whatever must not come next."""
        for token in self._generation.token_ids[self._read :]:
            self._state = self._state.feed(self._pieces.text(token)) or self._state
        self._read = len(self._generation.token_ids)
        if self._state.is_complete:
            allowed = [token for token in self._generation.eos_ids if token < scores.size]
        else:
            allowed = self._fitting(scores)
        kept = scores[allowed]
        scores[:] = -np.inf
        scores[allowed] = kept

    def _fitting(self, scores: Row) -> list[int]:
        """Return the likeliest tokens that fit, from which there is a way to the end in time."""
        room = self._generation.max_tokens - len(self._generation.token_ids) - 2
        fitting: list[int] = []
        for token in _by_likelihood(scores):
            text = self._pieces.text(token)
            after = self._state.feed(text) if text else None
            # Every character can be a token by itself, so as many tokens are enough.
            if after and after.shortest <= room:
                fitting.append(token)
                if len(fitting) == _ENOUGH:
                    break
        return fitting


def _by_likelihood(scores: Row) -> Any:
    """Go through tokens, likeliest first; all of them are sorted only if the first do not do."""
    size = min(_FIRST_LOOK, scores.size)
    first = np.argpartition(scores, -size)[-size:]
    yield from first[np.argsort(-scores[first], kind="stable")].tolist()
    seen = set(first.tolist())
    yield from (token for token in np.argsort(-scores).tolist() if token not in seen)
