"""A sequence of tokens under way: no text here, for the backend knows ids alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmserve.runtime.generation import STOP, Generation
from llmserve.runtime.params import Params


class IdTokenizer:
    """Gives a sampler the ids of bad words, which are written as numbers here.

    >>> IdTokenizer().encode("5 6"), IdTokenizer().encode(" 5 6")
    ([5, 6], [])
    """

    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids that a word was written as; its second form, after a space, has none."""
        del special
        return [] if text.startswith(" ") else [int(number) for number in text.split()]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """There is no text here."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """There is no text here."""
        del ids
        return ""


def written(ids: Sequence[int]) -> str:
    """Write a word's ids so that :class:`IdTokenizer` reads them."""
    return " ".join(str(token) for token in ids)


class Tokens(Generation):
    """One sequence; it ends at the engine's stop words too, which are ids.

    As TensorRT-LLM does, it keeps the id that ends an answer to itself, and tells stop words.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: Params,
        stop_ids: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        end_id: int | None,
        is_cancelled: Callable[[], bool],
    ) -> None:
        super().__init__(
            prompt_ids,
            params,
            max_tokens=max_tokens,
            eos_ids=frozenset() if end_id is None else frozenset({end_id}),
            decode=lambda _: "",
            is_cancelled=is_cancelled,
        )
        self._stops = [list(ids) for ids in stop_ids if ids]
        self._told = 0

    def push(self, token_id: int, logits: Any = None) -> None:
        """Take the next token; nobody is told of its logits."""
        del logits
        super().push(token_id)
        if self.done or len(self.token_ids) < self.params.min_tokens:
            return
        if any(self.token_ids[-len(ids) :] == ids for ids in self._stops):
            self._finish(STOP)

    @property
    def said(self) -> list[int]:
        """The tokens that are told: all but the one that ends the answer."""
        ended = self.finish_reason == STOP and self.token_ids[-1:] and not self.params.ignore_eos
        return (
            self.token_ids[:-1] if ended and self.token_ids[-1] in self.eos_ids else self.token_ids
        )

    def take_ids(self) -> list[int]:
        """Return the tokens that came since the last time."""
        new = self.said[self._told :]
        self._told = len(self.said)
        return new
