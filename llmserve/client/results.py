"""Results of requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from llmserve.errors import RequestRejectedError

Prompts = list[str] | tuple[str, ...]
Prompt = str | Prompts


@dataclass(frozen=True)
class Logprob:
    """A token and its log-probability; ``top`` are the likeliest tokens at its position."""

    id: int
    token: str
    logprob: float
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A tool call, or in a stream the next part of one; ``arguments`` is JSON."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Completion:
    """A whole answer.

    ``finish_reason`` is ``"stop"``, ``"length"``, ``"cancelled"``, or ``"tool_calls"`` if there are
    any; it and the counts are None if the model does not return them. ``extra`` contains the extra
    outputs of a formatter by name: all others with one value per prompt. ``logprobs`` has an entry
    for each token of the answer, if the request asked for them. ``reasoning`` is what the model
    has thought before its answer, and ``reasoning_tokens`` their number, if they are told apart.
    """

    text: str
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    logprobs: tuple[Logprob, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    reasoning_tokens: int | None = None

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Completion:
        """Join the pieces of one answer."""
        return gather(pieces, 1)[0]


@dataclass(frozen=True)
class Piece:
    """The next part of an answer; ``index`` is the position of its prompt in the request.

    The last piece of an answer has a ``finish_reason`` if the model returns one. The counts
    are those of the answer so far, ``extra`` is as in :class:`Completion`, and ``logprobs`` are
    those of the tokens in this piece, as are ``tool_calls`` if they are parsed. ``reasoning`` is
    more of what the model thinks, and ``reasoning_tokens`` how many it has thought so far.
    """

    text: str
    index: int = 0
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    logprobs: tuple[Logprob, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    reasoning_tokens: int | None = None

    @property
    def is_news(self) -> bool:
        """Whether the piece has content: a batch has empty pieces for rows that wait."""
        content = self.text or self.reasoning or self.logprobs or self.tool_calls
        return bool(content) or self.finish_reason is not None


def gather(pieces: Iterable[Piece], count: int) -> list[Completion]:
    """Join pieces to one answer per prompt."""
    texts: list[list[str]] = [[] for _ in range(count)]
    answers = [Completion("") for _ in range(count)]
    for piece in pieces:
        texts[piece.index].append(piece.text)
        so_far = answers[piece.index]
        input_tokens, output_tokens = piece.input_tokens, piece.output_tokens
        answers[piece.index] = replace(
            so_far,
            finish_reason=piece.finish_reason or so_far.finish_reason,
            input_tokens=so_far.input_tokens if input_tokens is None else input_tokens,
            output_tokens=so_far.output_tokens if output_tokens is None else output_tokens,
            extra=piece.extra or so_far.extra,
            logprobs=(so_far.logprobs or ()) + piece.logprobs
            if piece.logprobs is not None
            else so_far.logprobs,
        )
    return [replace(answer, text="".join(t)) for t, answer in zip(texts, answers, strict=True)]


class Form(Protocol):
    """The part of a pydantic model class that is used here."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]: ...

    @classmethod
    def model_validate_json(cls, json_data: str) -> Any: ...


F = TypeVar("F", bound=Form)


def schema_of(form: type[Form]) -> Any:
    """Return the schema of a form, closed to properties that its class would only discard."""
    return _closed(form.model_json_schema())


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def parse(form: type[F], answer: Completion) -> F:
    """Parse an answer into an instance of its form; a truncated answer is an error."""
    if answer.finish_reason == "length":
        raise RequestRejectedError(
            f"the answer was cut off after {answer.output_tokens} tokens, before it was complete",
            hint="increase max_tokens",
        )
    instance: F = form.model_validate_json(answer.text)
    return instance
