"""What one request asks for beside its text, checked once when it arrives."""

from __future__ import annotations

import difflib
import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from llmserve.runtime.errors import RequestError
from llmserve.runtime.logprobs import MOST

_INT32 = 2**31 - 1
# Every word is looked for after every token, beside the other requests of a batch.
_MOST_WORDS = 64
_LONGEST_WORD = 256
_MOST_BIASES = 1024
# A choice is compiled once, whatever its length.
_MOST_CHOICES = 1024
# No name longer than this is a misspelling of one of ours, and nobody misspells more. To compare
# takes time: half a millisecond for each.
_LONGEST_NAME, _MOST_COMPARED = 32, 16

Read = Callable[[str, Any], Any]


def whole_number(low: int, high: int) -> Read:
    """Return what reads a whole number, or refuses it."""

    def read(name: str, value: Any) -> int:
        # A bool is an int to Python, and a float with a fraction is nobody's count.
        strange = isinstance(value, bool) or (isinstance(value, float) and not value.is_integer())
        try:
            number = None if strange else int(value)
        except (TypeError, ValueError):
            number = None
        if number is None:
            raise RequestError(f"{name} takes a whole number, not {_short(value)}")
        if not low <= number <= high:
            raise RequestError(f"{name} must be from {low} to {high}, not {_short(number)}")
        return number

    return read


def any_number(low: float, high: float, *, open_low: bool = False) -> Read:
    """Return what reads a number, or refuses it."""

    def read(name: str, value: Any) -> float:
        try:
            number = float(value) if not isinstance(value, bool) else math.nan
        except OverflowError:
            number = math.inf if value > 0 else -math.inf
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number):
            raise RequestError(f"{name} takes a number, not {_short(value)}")
        if not low <= number <= high or (open_low and number == low):
            above = "above" if open_low else "from"
            raise RequestError(f"{name} must be {above} {low:g} to {high:g}, not {number:g}")
        return number

    return read


def _truth(name: str, value: Any) -> bool:
    if value in (True, False, "true", "false"):
        return value in (True, "true")
    raise RequestError(f"{name} takes true or false, not {_short(value)}")


def _form(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{name} takes text, not {_short(value)}")
    return check_text(name, value)


def _words(name: str, value: Any, most: int = _MOST_WORDS) -> tuple[str, ...]:
    """A list of words; as a request parameter, which has no lists, a JSON array or one word."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.startswith("[") else [value]
        except (ValueError, RecursionError):
            value = [value]
    if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
        raise RequestError(f"{name} takes a list of words, not {_short(value)}")
    if len(value) > most or any(len(word) > _LONGEST_WORD for word in value):
        raise RequestError(f"{name} takes at most {most} words of {_LONGEST_WORD} characters")
    return tuple(check_text(name, word) for word in value if word)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of token ids; as a request parameter, a JSON array."""
    ids = _from_json(name, value)
    if not isinstance(ids, (list, tuple)) or not ids:
        raise RequestError(f"{name} takes a list of token ids, not {_short(value)}")
    read = whole_number(0, _INT32)
    return tuple(read(name, one) for one in ids)


def _biases(name: str, value: Any) -> dict[int, float]:
    given = _from_json(name, value)
    if not isinstance(given, dict) or len(given) > _MOST_BIASES:
        raise RequestError(
            f"{name} takes a JSON object of at most {_MOST_BIASES} numbers by token ids, "
            f"not {_short(value)}"
        )
    read_id, read_bias = whole_number(0, _INT32), any_number(-100, 100)
    return {read_id(name, token): read_bias(name, bias) for token, bias in given.items()}


def _names(name: str, value: Any) -> dict[str, Any]:
    given = _from_json(name, value)
    if not isinstance(given, dict):
        raise RequestError(f"{name} takes a JSON object, not {_short(value)}")
    return given


def _from_json(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise RequestError(f"{name} takes JSON, not {_short(value)}") from None


def check_text(name: str, text: str) -> str:
    """Refuse half a character, which JSON can write and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not UTF-8: half a character at {error.start}") from None
    return text


def _short(value: object) -> str:
    """Return a value as an error quotes it, with the middle of a long one left out."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60


def _asked(read: Read, default: Any = None) -> Any:
    """Make a field of :class:`Params`, with what reads it from a request."""
    return field(default=default, metadata={"read": read})


@dataclass(frozen=True)
class Params:
    """How one prompt is to be answered. A field that was not asked for has its default.

    Without a temperature the answer is greedy, unless top_k, top_p or min_p ask for a
    choice; then the temperature is 1.
    """

    max_tokens: int | None = _asked(whole_number(1, _INT32))
    min_tokens: int = _asked(whole_number(0, _INT32), 0)
    temperature: float | None = _asked(any_number(0, 100))
    top_k: int = _asked(whole_number(-1, _INT32), 0)
    top_p: float = _asked(any_number(0, 1, open_low=True), 1.0)
    min_p: float = _asked(any_number(0, 1), 0.0)
    repetition_penalty: float = _asked(any_number(0.01, 100), 1.0)
    presence_penalty: float = _asked(any_number(-100, 100), 0.0)
    frequency_penalty: float = _asked(any_number(-100, 100), 0.0)
    seed: int | None = _asked(whole_number(0, 2**64 - 1))
    ignore_eos: bool = _asked(_truth, False)
    end_id: int | None = _asked(whole_number(-1, _INT32))
    stop_words: tuple[str, ...] = _asked(_words, ())
    include_stop_str_in_output: bool = _asked(_truth, False)
    bad_words: tuple[str, ...] = _asked(_words, ())
    logprobs: int | None = _asked(whole_number(0, MOST))
    return_log_probs: bool = _asked(_truth, False)
    prompt_logprobs: int | None = _asked(whole_number(0, MOST))
    stream: bool | None = _asked(_truth)
    exclude_input_in_output: bool | None = _asked(_truth)
    logit_bias: Mapping[int, float] = field(default_factory=dict, metadata={"read": _biases})
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, metadata={"read": _names})
    input_ids: tuple[int, ...] = _asked(_ids, ())
    prompt_only: bool = _asked(_truth, False)
    return_num_input_tokens: bool = _asked(_truth, False)
    return_num_output_tokens: bool = _asked(_truth, False)
    """Triton's OpenAI frontend asks so, and adds up the counts of a stream's pieces."""
    json_schema: str | None = _asked(_form)
    json_object: bool = _asked(_truth, False)
    choice: tuple[str, ...] = _asked(partial(_words, most=_MOST_CHOICES), ())
    regex: str | None = _asked(_form)
    grammar: str | None = _asked(_form)
    guided_decoding_guide_type: str | None = _asked(_form)
    guided_decoding_guide: str | None = _asked(_form)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def effective_temperature(self) -> float:
        """The temperature in force: 0 means greedy."""
        if self.temperature is not None:
            return self.temperature
        return 1.0 if self.top_k > 1 or self.top_p < 1 or self.min_p > 0 else 0.0

    @property
    def logprobs_count(self) -> int | None:
        """How many tokens' log-probabilities to give beside the chosen one's.

        None where no log-probabilities were asked for.
        """
        return 0 if self.logprobs is None and self.return_log_probs else self.logprobs

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is the answer, with nothing to add or forbid."""
        return (
            (self.effective_temperature == 0 or self.top_k == 1)
            and self.min_tokens == 0
            and self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and not self.bad_words
            and not self.logit_bias
        )


READERS: dict[str, Read] = {
    one.name: one.metadata["read"] for one in fields(Params) if "read" in one.metadata
}


def read_params(values: Mapping[str, Any], *, extras: frozenset[str] = frozenset()) -> Params:
    """Read what was asked for; ``extras`` are names that a plugin's generator reads itself.

    A name that nobody knows is left alone, for Triton's tools send their own, unless it is so
    close to one of ours that it is surely a misspelling.
    """
    known: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    strange: list[str] = []
    for name, value in values.items():
        if name in READERS:
            known[name] = READERS[name](name, value)
        elif name in extras:
            extra[name] = value
        elif len(name) <= _LONGEST_NAME and len(strange) < _MOST_COMPARED:
            strange.append(name)
    for name in strange:
        if close := difflib.get_close_matches(name, READERS, n=1, cutoff=0.8):
            raise RequestError(f"no parameter {name!r}: did you mean {close[0]!r}?")
    return Params(**known, extra=extra)
