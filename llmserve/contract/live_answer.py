"""A user's answer as the model itself may judge it later: the tokens, and what they were given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

MOST_TOKENS = 1024
"""Longer ones, prompt and answer together, would keep users waiting while they are judged."""
MOST_BYTES = 48_000
"""Of what is asked and of the tokens, as JSON: a line on the control socket may have 64 KiB."""


class Scored(Protocol):
    """A token with its log-probability, and the likeliest ones at its place, if they are known."""

    @property
    def id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> Sequence[Scored]: ...


@dataclass(frozen=True)
class LiveAnswer:
    """An answer to a user, kept in memory alone until it is judged.

    What it says is in no ``repr``, so that no log and no error has it.
    """

    model: str
    asked: Mapping[str, Any] = field(repr=False)
    """The options that make the prompt, and the adapter, as the model got them."""
    ids: tuple[int, ...] = field(repr=False)
    logprobs: tuple[float, ...] = field(repr=False)
    """How likely the model found each of its tokens when it chose it."""
    likeliest: tuple[bool, ...] = field(repr=False)
    """Whether it found no other token likelier."""
    input_tokens: int
    age: float
    """Seconds since it was asked for."""
    url: str = ""
    """The gRPC address of the Triton that has given it, if that is known."""
    adapter_files: str = ""
    """What tells the files of its adapter from those of another of that name; ``serve`` looks."""

    @property
    def adapter(self) -> str:
        """The name of the adapter that has answered, "" for the model itself."""
        return str(self.asked.get("adapter") or "")

    @classmethod
    def of(
        cls,
        model: str,
        asked: Mapping[str, Any],
        tokens: Sequence[Scored],
        input_tokens: int,
        age: float = 0.0,
        url: str = "",
    ) -> LiveAnswer:
        """Return an answer of these tokens."""
        return cls(
            model, asked, tuple(each.id for each in tokens),
            tuple(each.logprob for each in tokens),
            tuple(bool(each.top) and each.logprob >= each.top[0].logprob for each in tokens),
            input_tokens, age, url,
        )  # fmt: skip

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
                int(content["input_tokens"]), float(content["age"]), str(content["url"]),
            )  # fmt: skip
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"not an answer ({type(error).__name__})") from None
        if not ids or not len(ids) == len(logprobs) == len(likeliest):
            raise ValueError("not an answer: its tokens and their scores are not as many")
        return read
