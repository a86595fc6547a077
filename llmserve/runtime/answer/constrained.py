"""Constrains answers to a JSON schema, a choice, a regular expression or a grammar.

llguidance computes which tokens may come next; ``compiling`` imports it on the first such request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime.answer.compiling import Compiled, Form, refusal
from llmserve.runtime.answer.generation import Generation
from llmserve.runtime.answer.params import Params
from llmserve.runtime.errors import RequestError, invalid_value

_MAX_BYTES = 65_536
_MAX_DEPTH = 64
# Options that can forbid a required token, or end an answer before it is complete.
_CONFLICTING = ("ignore_eos", "min_tokens", "bad_words", "end_id")
# The longest texts of these formats with nanoseconds and an offset.
_TIMES = {"date-time": 35, "time": 24}
_VALUES = ("const", "enum", "default", "examples", "example")
_OPTIONS = ("json_schema", "json_object", "choice", "regex", "grammar", "guided_decoding_guide")

# The upper bounds of eight scores for each value of a byte; a lookup is faster than a selection.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS = np.where(_BITS, np.inf, -np.inf)


class FormConstraint:
    """The constraint of one generation: follows its tokens through the compiled form."""

    def __init__(self, generation: Generation, form: Future[Compiled]) -> None:
        self._generation = generation
        self._form = form
        self._matcher: Any = None
        self._vocabulary = 0
        self._consumed = len(generation.token_ids)
        self._shared_size = 0
        self._forced: list[int] = []
        self._forced_start = 0
        self._before: Sequence[int] = ()

    def begin(self, ids: Sequence[int] = ()) -> None:
        """Apply to what follows alone; ``ids`` are the tokens of it that are there already."""
        self._consumed = self._forced_start = len(self._generation.token_ids)
        self._forced = []
        if self._matcher is None:
            self._before = ids
        elif ids:
            self._matcher.consume_tokens(list(ids))

    @property
    def complete(self) -> bool:
        """Whether nothing can follow what is there."""
        self._catch_up()
        return bool(self._matcher.is_stopped())

    @property
    def pending(self) -> bool:
        """Whether the form is still being compiled."""
        return not self._form.done()

    def settle(self) -> None:
        """Wait until the form is compiled; raise :class:`RequestError` if it is refused."""
        if self._matcher is None:
            # The same refusal is kept for all requests: raised itself, it would keep all of them.
            if error := self._form.exception():
                if isinstance(error, RequestError):
                    raise error.again()
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            compiled = self._form.result()
            self._matcher, self._vocabulary = compiled.matcher.deep_copy(), compiled.vocabulary
            if self._before:
                self._matcher.consume_tokens(list(self._before))

    def __call__(self, scores: npt.NDArray[Any]) -> None:
        self._catch_up()
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise refusal("constraint", self._matcher.get_error())
        # A model can have more scores than its tokenizer has tokens.
        self._shared_size = min(self._vocabulary, scores.size)
        scores[self._shared_size :] = -np.inf
        _mask(scores[: self._shared_size], np.frombuffer(mask, dtype=np.uint32))

    def forced(self) -> Sequence[int]:
        """Return the next tokens where the form leaves only one choice."""
        at = self._catch_up() - self._forced_start
        chosen = self._generation.token_ids[self._forced_start :]
        # From the middle of a forced run, llguidance could split the rest into other tokens.
        if chosen != self._forced[:at] or at >= len(self._forced):
            tokens, self._forced_start = self._matcher.compute_ff_tokens(), self._consumed
            usable = all(token < self._shared_size for token in tokens)
            at, self._forced = 0, tokens if usable else []
        return self._forced[at:]

    def _catch_up(self) -> int:
        """Pass newly chosen tokens to the matcher and return the number of tokens so far."""
        self.settle()
        tokens = self._generation.token_ids
        if len(tokens) > self._consumed:
            self._matcher.consume_tokens(tokens[self._consumed :])
            self._consumed = len(tokens)
        return self._consumed


def _mask(scores: npt.NDArray[Any], words: npt.NDArray[np.uint32]) -> None:
    """Set the scores whose bits are not set to minus infinity."""
    # As booleans, nonzero words are found five times as fast as numbers.
    places = np.flatnonzero(words.astype(bool))
    if places.size < words.size // 8:
        bits = np.unpackbits(words[places].view(np.uint8), bitorder="little")
        at = np.flatnonzero(bits.view(bool))
        ids = (places[at >> 5] << 5) | (at & 31)
        ids = ids[: ids.searchsorted(scores.size)]
        kept = scores[ids]
        scores.fill(-np.inf)
        scores[ids] = kept
    else:
        bounds = _BOUNDS.take(words.view(np.uint8), axis=0).reshape(-1)
        np.minimum(scores, bounds[: scores.size], out=scores)


def form_of(params: Params) -> Form | None:
    """Return the constraint that a request asks for, None if it asks for none."""
    names = [name for name in _OPTIONS if getattr(params, name)]
    if len(names) > 1:
        problem = f"an answer can have only one constraint: send {' or '.join(names)}"
        raise RequestError(problem, code="conflicting_options")
    kind = params.guided_decoding_guide_type
    if kind and not params.guided_decoding_guide and kind != "json":
        raise invalid_value("guided_decoding_guide_type", "needs guided_decoding_guide")
    if kind and names not in ([], ["guided_decoding_guide"]):
        raise _conflict("guided_decoding_guide_type", names[0], named="guided_decoding_guide_type")
    if not names and kind != "json":
        return None
    for name in _CONFLICTING:
        if getattr(params, name):
            raise _conflict("a constrained answer", name, named=name)
    if params.json_object or not names:
        return "json_schema", '{"type":"object"}'
    name = names[0]
    if name == "choice":
        return "regex", "|".join(map(_escape, params.choice))
    text = _bounded(name, str(getattr(params, name)))
    if name == "guided_decoding_guide":
        name = _guide_kind(kind)
    return name, _checked_schema(text) if name == "json_schema" else text


def call_form_of(params: Params) -> Form | None:
    """Return the form of the calls that an answer may have, None if they are free."""
    if not (params.call_schema and params.call_marks):
        return None
    return "json_schema", _checked_schema(
        _bounded("call_schema", params.call_schema), "call_schema"
    )


def _bounded(name: str, text: str) -> str:
    if len(text.encode()) > _MAX_BYTES:
        problem = f"has {len(text.encode())} bytes: send at most {_MAX_BYTES}"
        raise invalid_value(name, problem)
    return text


def _conflict(one: str, other: str, *, named: str) -> RequestError:
    problem = f"{one} conflicts with {other}: leave it out"
    return RequestError(problem, code="conflicting_options", param=named)


def _guide_kind(kind: str | None) -> str:
    """Return the kind of form for the name that TensorRT-LLM gives a kind of guide."""
    kinds = {"json": "json_schema"} | {k: k for k in ("json_schema", "regex", "ebnf_grammar")}
    if kind not in kinds:
        problem = f"is one of {', '.join(kinds)}, not {kind!r}"
        raise invalid_value("guided_decoding_guide_type", problem)
    return kinds[kind]


def _checked_schema(text: str, name: str = "json_schema") -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_value(name, f"is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise invalid_value(name, "takes a JSON object as defined by json-schema.org")
    if _depth(schema) > _MAX_DEPTH:
        raise invalid_value(name, f"is nested deeper than {_MAX_DEPTH}: make it flatter")
    return json.dumps(schema) if _bound_times(schema) else text


def _bound_times(schema: Any) -> bool:
    """Limit times, which may have any number of decimals, to nanoseconds; return if there are any.

    Small models tend to write digits until the answer has to end.
    """
    if isinstance(schema, list):
        return any([_bound_times(item) for item in schema])
    if not isinstance(schema, dict):
        return False
    length = _TIMES.get(kind) if isinstance(kind := schema.get("format"), str) else None
    if length is not None:
        longest = schema.setdefault("maxLength", length)
        if isinstance(longest, int):
            schema["maxLength"] = min(longest, length)
    # The values of these are no schemas.
    inner = [_bound_times(value) for name, value in schema.items() if name not in _VALUES]
    return any(inner) or length is not None


def _depth(value: Any) -> int:
    """Return how deep a JSON value is nested, computed without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
    return depth


def _escape(word: str) -> str:
    """Return a regular expression for a literal word that llguidance and xgrammar both accept."""
    return re.sub(r"[\\^$.|?*+()\[\]{}]", r"\\\g<0>", word)
