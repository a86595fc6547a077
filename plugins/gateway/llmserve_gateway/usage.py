"""Token counts of a request."""

from __future__ import annotations


class Usage:
    """Counts the tokens of a request with several prompts and several answers to each."""

    def __init__(self, answers: int, answers_per_prompt: int) -> None:
        self._input_tokens = [0] * answers
        self._output_tokens = [0] * answers
        self._answers_per_prompt = answers_per_prompt

    def update(self, index: int, input_tokens: int | None, output_tokens: int | None) -> None:
        self._input_tokens[index] = input_tokens or self._input_tokens[index]
        self._output_tokens[index] = output_tokens or self._output_tokens[index]

    @property
    def input_tokens(self) -> int:
        """The tokens of all prompts; one prompt with several answers counts once."""
        return sum(self._input_tokens[:: self._answers_per_prompt])

    @property
    def output_tokens(self) -> int:
        return sum(self._output_tokens)

    def as_json(self) -> dict[str, int]:
        input_tokens, output_tokens = self.input_tokens, self.output_tokens
        return {
            "prompt_tokens": input_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens,
        }
