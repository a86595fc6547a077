"""What a request gives back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from llmserve.errors import RequestRejectedError

Prompts = list[str] | tuple[str, ...]
Prompt = str | Prompts


@dataclass(frozen=True)
class Logprob:
    """A token and how likely the model held it; ``top`` are the likeliest at its place."""

    id: int
    token: str
    logprob: float
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, or in a stream the next part of one; ``arguments`` is JSON."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Completion:
    """A whole answer.

    ``finish_reason`` is ``"stop"``, ``"length"``, ``"cancelled"``, or ``"tool_calls"`` where there
    are some; it and the counts are None where the model does not say. ``extra`` has what a
    formatter adds: every other output with one value for each prompt, by its name. ``logprobs``
    has an entry for each token of the answer, where they were asked for.
    """

    text: str
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    logprobs: tuple[Logprob, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Piece:
    """The next part of an answer; ``index`` says of which prompt, when there are several.

    The last piece of an answer has a ``finish_reason`` where the model gives one. The counts
    are those of the answer so far, ``extra`` is as in :class:`Completion`, ``logprobs`` are
    of the tokens that came with this piece, and so are ``tool_calls`` where somebody reads them.
    """

    text: str
    index: int = 0
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    logprobs: tuple[Logprob, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def is_news(self) -> bool:
        """Whether it says anything: a batch has empty pieces for rows that wait."""
        return bool(self.text or self.logprobs or self.tool_calls) or self.finish_reason is not None


def gather(pieces: Iterable[Piece], count: int) -> list[Completion]:
    """Put pieces together, one answer per prompt."""
    texts: list[list[str]] = [[] for _ in range(count)]
    answers = [Completion("") for _ in range(count)]
    for piece in pieces:
        texts[piece.index].append(piece.text)
        so_far = answers[piece.index]
        counts = (piece.input_tokens, piece.output_tokens)
        answers[piece.index] = replace(
            so_far,
            finish_reason=piece.finish_reason or so_far.finish_reason,
            input_tokens=so_far.input_tokens if counts[0] is None else counts[0],
            output_tokens=so_far.output_tokens if counts[1] is None else counts[1],
            extra=piece.extra or so_far.extra,
            logprobs=(so_far.logprobs or ()) + piece.logprobs
            if piece.logprobs is not None
            else so_far.logprobs,
        )
    return [replace(answer, text="".join(t)) for t, answer in zip(texts, answers, strict=True)]


class Form(Protocol):
    """What a class has that pydantic makes: a schema, and a way back from JSON."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]: ...

    @classmethod
    def model_validate_json(cls, json_data: str) -> Any: ...


F = TypeVar("F", bound=Form)


def schema_of(form: type[Form]) -> Any:
    """Return the schema of a form, without room for what its class would only throw away."""
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


def parsed(form: type[F], answer: Completion) -> F:
    """Return an answer as an object of its form; one that was cut short is none."""
    if answer.finish_reason == "length":
        raise RequestRejectedError(
            f"the answer was cut after {answer.output_tokens} tokens, before its form was complete",
            mend="ask for more max_tokens",
        )
    found: F = form.model_validate_json(answer.text)
    return found
