"""Token counts of a request."""

from __future__ import annotations

from typing import Any

CACHED = "num_cached_tokens"
"""The output of a model that says how many of a prompt's tokens were in its cache."""


class Usage:
    """Counts the tokens of a request with several prompts and several answers to each."""

    def __init__(self, answers: int, answers_per_prompt: int) -> None:
        self._input_tokens = [0] * answers
        self._output_tokens = [0] * answers
        self._cached_tokens: list[int | None] = [None] * answers
        self._reasoning_tokens: list[int | None] = [None] * answers
        self._answers_per_prompt = answers_per_prompt

    def update(
        self,
        index: int,
        input_tokens: int | None,
        output_tokens: int | None,
        cached_tokens: int | None = None,
        reasoning_tokens: int | None = None,
    ) -> None:
        if reasoning_tokens is not None:
            self._reasoning_tokens[index] = reasoning_tokens
        if cached_tokens is not None:
            self._cached_tokens[index] = cached_tokens
        self._input_tokens[index] = input_tokens or self._input_tokens[index]
        self._output_tokens[index] = output_tokens or self._output_tokens[index]

    @property
    def input_tokens(self) -> int:
        """The tokens of all prompts; one prompt with several answers counts once."""
        return sum(self._input_tokens[:: self._answers_per_prompt])

    @property
    def output_tokens(self) -> int:
        return sum(self._output_tokens)

    @property
    def cached_tokens(self) -> int | None:
        """How many of the prompts' tokens a model had in its cache, None if none of them says."""
        known = [n for n in self._cached_tokens[:: self._answers_per_prompt] if n is not None]
        return sum(known) if known else None

    @property
    def reasoning_tokens(self) -> int | None:
        """How many tokens the model thought before its answers, None if that is not known."""
        known = [n for n in self._reasoning_tokens if n is not None]
        return sum(known) if known else None

    def as_json(self) -> dict[str, Any]:
        input_tokens, output_tokens = self.input_tokens, self.output_tokens
        cached = self.cached_tokens
        details: dict[str, Any] = (
            {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
        )
        if (thought := self.reasoning_tokens) is not None:
            details["completion_tokens_details"] = {"reasoning_tokens": thought}
        return {
            **details,
            "prompt_tokens": input_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens,
        }
