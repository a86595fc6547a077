"""The parameters of one request, validated once when it arrives."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmserve.contract.bounded_json import TooManyPartsError, parse_json
from llmserve.contract.options import BIASES, INT32, OPTIONS, RequestOption, RequestOptions
from llmserve.runtime.errors import RequestError, invalid_value

# A longer name is not a misspelling of ours, and no request misspells more names. Each comparison
# takes half a millisecond.
_MAX_NAME_LENGTH, _MAX_COMPARED = 32, 16

Reader = Callable[[str, Any], Any]


def whole_number(low: int, high: int) -> Reader:
    """Return a reader of whole numbers from ``low`` to ``high``."""

    def read(name: str, value: Any) -> int:
        # To Python, a bool is an int; and int() would cut off a fraction.
        invalid = isinstance(value, bool) or (isinstance(value, float) and not value.is_integer())
        try:
            number = None if invalid else int(value)
        except (TypeError, ValueError):
            number = None
        if number is None:
            raise invalid_value(name, f"takes a whole number, not {_quoted(value)}")
        if not low <= number <= high:
            raise invalid_value(name, f"must be from {low} to {high}, not {_quoted(number)}")
        return number

    return read


def any_number(low: float, high: float, *, open_low: bool = False) -> Reader:
    """Return a reader of numbers from ``low``, or above it if ``open_low``, to ``high``."""

    def read(name: str, value: Any) -> float:
        try:
            number = float(value) if not isinstance(value, bool) else math.nan
        except OverflowError:
            number = math.inf if value > 0 else -math.inf
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number):
            raise invalid_value(name, f"takes a number, not {_quoted(value)}")
        if not low <= number <= high or (open_low and number == low):
            above = "above" if open_low else "from"
            raise invalid_value(name, f"must be {above} {low:g} to {high:g}, not {number:g}")
        return number

    return read


def _boolean(name: str, value: Any) -> bool:
    if value in (True, False, "true", "false"):
        return value in (True, "true")
    raise invalid_value(name, f"takes true or false, not {_quoted(value)}")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid_value(name, f"takes text, not {_quoted(value)}")
    return check_text(name, value)


def _words(maximum: int, longest: int) -> Reader:
    """Read words: a list, or as a request parameter, which has no lists, JSON or a single word."""

    def read(name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            try:
                value = parse_json(value) if value.startswith("[") else [value]
            except (ValueError, RecursionError):
                value = [value]
        if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
            raise invalid_value(name, f"takes a list of words, not {_quoted(value)}")
        if len(value) > maximum or any(len(word) > longest for word in value):
            raise invalid_value(name, f"takes at most {maximum} words of {longest} characters")
        return tuple(check_text(name, word) for word in value if word)

    return read


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """Read token ids: a list, or as a request parameter, a JSON array."""
    ids = _from_json(name, value)
    if not isinstance(ids, (list, tuple)) or not ids:
        raise invalid_value(name, f"takes a list of token ids, not {_quoted(value)}")
    read = whole_number(0, INT32)
    return tuple(read(name, token) for token in ids)


def _biases(maximum: int) -> Reader:
    def read(name: str, value: Any) -> dict[int, float]:
        biases = _from_json(name, value)
        if not isinstance(biases, dict) or len(biases) > maximum:
            what = f"a JSON object of at most {maximum} numbers by token ids"
            raise invalid_value(name, f"takes {what}, not {_quoted(value)}")
        read_id, read_bias = whole_number(0, INT32), any_number(*BIASES)
        return {read_id(name, token): read_bias(name, bias) for token, bias in biases.items()}

    return read


def _dict(name: str, value: Any) -> dict[str, Any]:
    content = _from_json(name, value)
    if not isinstance(content, dict):
        raise invalid_value(name, f"takes a JSON object, not {_quoted(value)}")
    return content


def _from_json(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except TooManyPartsError as error:
        raise invalid_value(name, f"cannot be read: {error}") from None
    except (ValueError, RecursionError):
        raise invalid_value(name, f"takes JSON, not {_quoted(value)}") from None


def check_text(name: str, text: str) -> str:
    """Refuse an unpaired surrogate, which JSON can contain but no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid_value(name, f"is not UTF-8: half a character at {error.start}") from None
    return text


def _quoted(value: object) -> str:
    """Return a value for an error message, with the middle of a long one left out."""
    return _REPR.repr(value)


# Below this temperature, practically only the likeliest token is left of a distribution.
_GREEDY_BELOW = 1e-5

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 60


@dataclass(frozen=True, kw_only=True)
class Params(RequestOptions):
    """How to answer one prompt; ``extra`` are the options that a plugin's generator reads itself.

    Without a temperature the answer is greedy, unless top_k, top_p or min_p request sampling;
    then the temperature is 1.
    """

    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def effective_temperature(self) -> float:
        """The temperature in force: 0 means greedy."""
        if self.temperature is not None:
            return self.temperature
        return 1.0 if self.top_k > 1 or self.top_p < 1 or self.min_p > 0 else 0.0

    @property
    def greedy(self) -> bool:
        """Whether the next token is the likeliest one; penalties and biases may change which."""
        return self.effective_temperature < _GREEDY_BELOW or self.top_k == 1

    def ends(self, of_model: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end the answer: those of its model, or the request's own."""
        own = self.end_id
        return of_model if own is None or own < 0 else frozenset({own})

    @property
    def logprobs_count(self) -> int | None:
        """How many tokens' log-probabilities to return besides that of the chosen token.

        None if the request asks for no log-probabilities.
        """
        return 0 if self.logprobs is None and self.return_log_probs else self.logprobs

    @property
    def plain(self) -> bool:
        """Whether the next token is always the likeliest one, with no score changed."""
        return (
            self.greedy
            and self.min_tokens == 0
            and self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and not self.bad_words
            and not self.logit_bias
        )


def _reader(row: RequestOption) -> Reader:
    low, high = row.low, row.high
    readers: dict[str, Reader] = {
        "whole": whole_number(int(low), int(high)),
        "number": any_number(low, high, open_low=row.above),
        "flag": _boolean,
        "text": _text,
        "words": _words(int(high), row.longest),
        "ids": _ids,
        "biases": _biases(int(high)),
        "object": _dict,
    }
    return readers[row.kind]


READERS = {name: _reader(row) for name, row in OPTIONS.items()}


def read_params(values: Mapping[str, Any], *, extras: frozenset[str] = frozenset()) -> Params:
    """Read the parameters; ``extras`` are names that a plugin's generator reads itself.

    Unknown names are ignored, since Triton's tools send some of their own, unless a name is so
    close to one of ours that it must be a misspelling.
    """
    params: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in values.items():
        if read := READERS.get(name):
            params[name] = read(name, value)
        elif name in extras:
            extra[name] = value
        elif len(name) <= _MAX_NAME_LENGTH and len(unknown) < _MAX_COMPARED:
            unknown.append(name)
    for name in unknown:
        if close := difflib.get_close_matches(name, READERS, n=1, cutoff=0.8):
            problem = f"unknown parameter {name!r}: did you mean {close[0]!r}?"
            raise RequestError(problem, code="unknown_option", param=name)
    return Params(**params, extra=extra)
