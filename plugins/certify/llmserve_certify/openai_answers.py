"""What a server with OpenAI's API sends, held to what the API defines.

Whatever else comes is the server's mistake, and none of the check that reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from llmserve.client import Logprob
from llmserve_certify.endpoint import Decision, Malformed, Refusal, Reply

if TYPE_CHECKING:
    from llmserve_certify.encoder import Vector

A = TypeVar("A")


class StreamPart(NamedTuple):
    """A part of a stream; what it does not say is None."""

    texts: tuple[str, ...]
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    logprobs: tuple[Logprob, ...] | None = None


def read_answer(data: bytes) -> Reply:
    """Read a whole answer; raise :class:`Malformed`."""
    return _read(data, "the answer", _answer)


def read_part(data: bytes) -> StreamPart:
    """Read a part of a stream; raise :class:`Malformed`, or :class:`Refusal` if it is an error."""
    return _read(data, "a part of the stream", _part)


def read_vectors(data: bytes) -> list[Vector]:
    """Read embeddings in the order of their texts; raise :class:`Malformed`."""
    return _read(data, "the answer", _vectors)


def read_decisions(data: bytes) -> dict[str, Decision]:
    """Read the answers to typed questions; raise :class:`Malformed`."""
    return _read(data, "the answer", _decisions, "the API of typed decisions")


def joined(parts: Iterable[StreamPart]) -> Reply:
    """Return the answer that a stream makes."""
    texts: list[str] = []
    last = StreamPart(())
    logprobs: list[Logprob] | None = None
    for part in parts:
        texts += part.texts
        if part.logprobs is not None:
            logprobs = [*(logprobs or ()), *part.logprobs]
        last = StreamPart(
            (),
            part.finish_reason or last.finish_reason,
            last.input_tokens if part.input_tokens is None else part.input_tokens,
            last.output_tokens if part.output_tokens is None else part.output_tokens,
        )
    return Reply(
        "".join(texts),
        last.finish_reason,
        last.input_tokens,
        last.output_tokens,
        None if logprobs is None else tuple(logprobs),
        tuple(filter(None, texts)),
        len(texts),
    )


def error_words(body: bytes) -> str:
    """Return what a response says that is an error, in whatever form."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        words = str(error.get("message", error) if isinstance(error, Mapping) else error)
    except (ValueError, AttributeError, RecursionError):
        words = body.decode(errors="replace")
    return " ".join(words.split())[:300]


def _read(
    data: bytes, what: str, read: Callable[[dict[str, Any]], A], api: str = "OpenAI's API"
) -> A:
    try:
        return read(_object(_json(data), "it"))
    except ValueError as error:
        raise Malformed(
            f"{what} is not of {api}: {error}", got=data.decode(errors="replace")
        ) from None


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise ValueError("it is no JSON") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _answer(content: dict[str, Any]) -> Reply:
    choices = _list(content, "choices", "it")
    if not choices:
        raise ValueError("it has no choices")
    choice = _object(choices[0], "its choice")
    text = _text(choice)
    if text is None:
        raise ValueError("its choice has neither text nor message")
    return Reply(text, _word(choice), *_counts(content), _logprobs(choice))


def _decisions(content: dict[str, Any]) -> dict[str, Decision]:
    answers = _object(content.get("answers"), "its answers")
    return {name: _decision(_object(found, name)) for name, found in answers.items()}


def _decision(found: dict[str, Any]) -> Decision:
    kind = _of(found, "type", str, "a text") or ""
    said = found.get(kind)
    if isinstance(said, bool) or not isinstance(said, (str, int, float)):
        raise ValueError(f"an answer of the type {kind[:40]!r} does not say what it is")
    # Some tell none for yes or no, as the answer is one.
    shares = _object(found.get("probabilities") or {}, "its probabilities")
    if any(
        isinstance(each, bool) or not isinstance(each, (int, float)) for each in shares.values()
    ):
        raise ValueError("a probability is no number")
    return Decision(kind, said, shares)


def _part(content: dict[str, Any]) -> StreamPart:
    if error := content.get("error"):
        status = error.get("code") if isinstance(error, Mapping) else None
        raise Refusal(status if isinstance(status, int) else 500, str(error))
    # The counts come in a part of their own, or beside the last choice.
    choices = _list(content, "choices", "it", or_none=bool(content.get("usage")))
    texts, reason = [], None
    logprobs: tuple[Logprob, ...] | None = None
    for found in choices:
        choice = _object(found, "its choice")
        reason = _word(choice) or reason
        text = _text(choice)
        if text is None and not reason and not _is_filters(choice):
            raise ValueError("its choice has neither text nor delta")
        texts.append(text or "")
        if (entries := _logprobs(choice)) is not None:
            logprobs = (*(logprobs or ()), *entries)
    return StreamPart(tuple(texts), reason, *_counts(content), logprobs)


def _text(choice: Mapping[str, Any]) -> str | None:
    text = _of(choice, "text", str, "a text")
    for name in ("delta", "message"):
        if text is None and choice.get(name) is not None:
            # An answer that is only a call of a tool has no content.
            text = _of(_object(choice[name], name), "content", str, "a text") or ""
    return text


def _is_filters(choice: Mapping[str, Any]) -> bool:
    """Whether it has what Azure's filter found, which comes behind the text that it is about."""
    return any(name.startswith("content_filter") for name in choice)


def _word(choice: Mapping[str, Any]) -> str | None:
    return _of(choice, "finish_reason", str, "a text")


def _counts(content: Mapping[str, Any]) -> tuple[int | None, int | None]:
    if content.get("usage") is None:
        return None, None
    usage = _object(content["usage"], "usage")
    prompt, answer = (
        _of(usage, name, int, "a whole number") for name in ("prompt_tokens", "completion_tokens")
    )
    return prompt, answer


def _logprobs(choice: Mapping[str, Any]) -> tuple[Logprob, ...] | None:
    """Read log-probabilities in either form; the API has no ids of tokens."""
    if choice.get("logprobs") in (None, {}):
        return None
    content = _object(choice["logprobs"], "logprobs")
    if "content" in content:
        found = _list(content, "content", "logprobs", or_none=True)
        return tuple(_entry(entry, "top_logprobs") for entry in found)
    tokens, values, tops = (
        _list(content, name, "logprobs", or_none=True)
        for name in ("tokens", "token_logprobs", "top_logprobs")
    )
    if len(tokens) != len(values) or len(tops) not in (0, len(tokens)):
        raise ValueError(
            f"logprobs has {len(tokens)} tokens, {len(values)} token_logprobs and {len(tops)} "
            "top_logprobs"
        )
    if values[:1] == [None]:
        # Of a prompt that is repeated: before its first token stands none that makes it likely.
        values = [math.nan, *values[1:]]
    rows = zip(tokens, values, tops or [None] * len(tokens), strict=True)
    return tuple(_logprob(token, value, _ranked(_tops(top))) for token, value, top in rows)


def _entry(found: Any, below: str = "") -> Logprob:
    entry = _object(found, "an entry of logprobs")
    others = _list(entry, below, "an entry of logprobs", or_none=True) if below else ()
    top = _ranked({other.token: other.logprob for other in map(_entry, others)})
    return _logprob(entry.get("token"), entry.get("logprob"), top)


def _tops(top: Any) -> dict[str, float]:
    likeliest = {} if top is None else _object(top, "an entry of top_logprobs")
    return {token: _number(value, f"of {token!r}") for token, value in likeliest.items()}


def _ranked(top: Mapping[str, float]) -> tuple[Logprob, ...]:
    ranked = sorted(top.items(), key=lambda item: -item[1])
    return tuple(Logprob(-1, token, value) for token, value in ranked)


def _logprob(token: Any, value: Any, top: tuple[Logprob, ...]) -> Logprob:
    if not isinstance(token, str):
        raise ValueError(f"a token of logprobs is {_shown(token)}, not a text")
    return Logprob(-1, token, _number(value, f"of {token!r}"), top)


def _vectors(content: dict[str, Any]) -> list[Vector]:
    import numpy as np

    found = []
    for item in _list(content, "data", "it"):
        entry = _object(item, "an entry of data")
        index = _of(entry, "index", int, "a whole number")
        if index is None:
            raise ValueError("an entry of data has no index")
        values = [_number(value, "") for value in _list(entry, "embedding", "an entry of data")]
        # What float32 cannot hold is infinite, and equal to no value of a model.
        with np.errstate(over="ignore"):
            found.append((index, np.array(values, np.float64).astype(np.float32)))
    return [vector for _, vector in sorted(found, key=lambda pair: pair[0])]


def _number(value: Any, whose: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(
            f"{f'the log-probability {whose}' if whose else 'a value'} is "
            f"{_shown(value)}, not a number"
        )
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a number is too large") from None


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {_shown(value)}, not an object")
    return value


def _list(content: Mapping[str, Any], name: str, of: str, *, or_none: bool = False) -> list[Any]:
    value = content.get(name)
    if value is None and not or_none:
        raise ValueError(f"{of} has no {name}")
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{name} is {_shown(value)}, not a list")
    return value or []


def _of(content: Mapping[str, Any], name: str, kind: type[A], words: str) -> A | None:
    value = content.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{name} is {_shown(value)}, not {words}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
