"""What is noted of one answer to a user, so that its model can judge it later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from llmserve.client import Completion, Logprob, Piece
from llmserve.runtime.contract import ADAPTER, OPTIONS
from llmserve.server import MOST_TOKENS, LiveAnswer

_OF_PROMPTS = (
    "messages",
    *(OPTIONS[name].name for name in ("chat_template_kwargs", "input_ids")),
    ADAPTER.name,
)

_Part = TypeVar("_Part", Completion, Piece)


class Sample:
    """What is noted of one answer; ``is_hidden`` if its user has not asked for its scores."""

    def __init__(self, *, is_hidden: bool) -> None:
        self.is_hidden = is_hidden
        self.asked: dict[str, Any] = {}
        self.tokens: list[Logprob] = []
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.url = ""

    def note(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> list[tuple[str, dict[str, Any]]]:
        """Note what the model is asked, and have it noted which replica answers that."""
        for prompt, options in calls:
            self.asked = {name: options[name] for name in _OF_PROMPTS if options.get(name)}
            self.asked |= {"prompt": prompt} if prompt else {}
        return [(prompt, {**options, "on_replica": self._sent_to}) for prompt, options in calls]

    def _sent_to(self, url: str) -> None:
        self.url = url

    def hear(self, part: _Part) -> _Part:
        """Note an answer, or a part of it, and return what its user may see."""
        self.tokens += part.logprobs or ()
        if part.input_tokens is not None:
            self.input_tokens = part.input_tokens
        if part.output_tokens is not None:
            self.output_tokens = part.output_tokens
        return replace(part, logprobs=None) if self.is_hidden else part

    def answer(self, model: str, age: float) -> LiveAnswer | None:
        """Return the answer, if all of it is known and it is not too long."""
        tokens, count = self.tokens, self.input_tokens
        if not tokens or count is None or len(tokens) != self.output_tokens:
            return None
        if count + len(tokens) > MOST_TOKENS:
            return None
        return LiveAnswer.of(model, self.asked, tokens, count, age, self.url)
