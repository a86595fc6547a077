"""A user's answer as the model itself may judge it later: the tokens, and what they were given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MOST_TOKENS = 1024
"""Longer ones, prompt and answer together, would keep users waiting while they are judged."""
MOST_BYTES = 48_000
"""Of what is asked and of the tokens, as JSON: a line on the control socket may have 64 KiB."""


@dataclass(frozen=True)
class LiveAnswer:
    """An answer to a user, kept in memory alone until it is judged.

    What it says is in no ``repr``, so that no log and no error has it.
    """

    model: str
    asked: Mapping[str, Any] = field(repr=False)
    """The options that make the prompt, as the model got them."""
    ids: tuple[int, ...] = field(repr=False)
    logprobs: tuple[float, ...] = field(repr=False)
    """How likely the model found each of its tokens when it chose it."""
    likeliest: tuple[bool, ...] = field(repr=False)
    """Whether it found no other token likelier."""
    input_tokens: int
    age: float
    """Seconds since it was asked for."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> LiveAnswer:
        """Read one; raise :class:`ValueError` if it is none."""
        try:
            ids = tuple(int(each) for each in content["ids"])
            logprobs = tuple(float(each) for each in content["logprobs"])
            likeliest = tuple(bool(each) for each in content["likeliest"])
            read = cls(
                str(content["model"]), dict(content["asked"]), ids, logprobs, likeliest,
                int(content["input_tokens"]), float(content["age"]),
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an answer ({type(error).__name__})") from None
        if not ids or not len(ids) == len(logprobs) == len(likeliest):
            raise ValueError("not an answer: its tokens and their scores are not as many")
        return read
