"""Tokens that a request took."""

from __future__ import annotations


class Usage:
    """Counts tokens of a request with several prompts and several answers to each."""

    def __init__(self, answers: int, each: int) -> None:
        self._read = [0] * answers
        self._written = [0] * answers
        self._each = each

    def note(self, index: int, read: int | None, written: int | None) -> None:
        self._read[index] = read or self._read[index]
        self._written[index] = written or self._written[index]

    @property
    def read(self) -> int:
        """The tokens of all prompts; several answers to one prompt read it once."""
        return sum(self._read[:: self._each])

    @property
    def written(self) -> int:
        return sum(self._written)

    def as_json(self) -> dict[str, int]:
        read, written = self.read, self.written
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        }
