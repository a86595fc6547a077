"""Constrains answers to a JSON schema, a choice, a regular expression or a grammar.

llguidance computes which tokens may come next; it is imported on the first such request.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Constraint, Generation
from llmserve.runtime.params import Params
from llmserve.runtime.protocols import Tokenizer

_MAX_BYTES = 65_536
_MAX_DEPTH = 64
_MAX_COMPILED = 64
# Options that can forbid a required token, or end an answer before it is complete.
_CONFLICTING = ("ignore_eos", "min_tokens", "bad_words", "end_id")
# A space, or a line break and its indentation. llguidance's default allows unlimited whitespace,
# and small models tend to write it forever.
_JSON_DEFAULTS = {"whitespace_pattern": r"(\n {0,12}| )?"}
_OPTIONS = ("json_schema", "json_object", "choice", "regex", "grammar", "guided_decoding_guide")

# The upper bounds of eight scores for each value of a byte; a lookup is faster than a selection.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS = np.where(_BITS, np.inf, -np.inf)

Form = tuple[str, str]
"""The kind of a constraint, and its text."""


class Compiler:
    """Compiles the constraints of one model's generations and caches the most recent ones."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> None:
        self._library = _llguidance()
        if not eos_ids:
            raise RequestError("this model has no end token: its answers cannot be constrained")
        tokenizer_json = getattr(tokenizer, "tokenizer_json", lambda: None)()
        if tokenizer_json is None:
            raise RequestError(
                "this model's answers cannot be constrained: its tokenizer has no tokenizer.json, "
                "which llguidance needs"
            )
        self._table = self._library.LLTokenizer(tokenizer_json, eos_token=sorted(eos_ids))
        self._compiled: OrderedDict[Form, Any] = OrderedDict()

    def constraint(self, generation: Generation, form: Form) -> Constraint:
        """Return the constraint for a generation; refuse a form that does not compile."""
        if form not in self._compiled:
            self._compiled[form] = self._compile(form)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(form)
        return _Matcher(generation, self._compiled[form].deep_copy(), self._table.vocab_size)

    def _compile(self, form: Form) -> Any:
        matcher = self._library.LLMatcher(self._table, self._grammar(*form), log_level=0)
        if matcher.is_error():
            raise _refusal(form[0], matcher.get_error())
        # The first mask reveals a form that can never begin or end; later masks take no longer.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise _refusal(form[0], "no text matches it")
        return matcher

    def _grammar(self, kind: str, text: str) -> Any:
        grammars = self._library.LLMatcher
        if kind == "regex":
            return grammars.grammar_from_regex(text)
        if kind == "json_schema":
            try:
                return grammars.grammar_from_json_schema(text, defaults=_JSON_DEFAULTS)
            except ValueError as error:
                raise _refusal(kind, str(error)) from None
        if kind == "ebnf_grammar":
            from llguidance.gbnf_to_lark import any_to_lark

            try:
                text = any_to_lark(text)
            except Exception as error:  # its parser raises bare exceptions
                raise _refusal(kind, str(error)) from None
        return grammars.grammar_from_lark(text)


class _Matcher:
    """The constraint of one generation: follows its tokens through the compiled form."""

    def __init__(self, generation: Generation, matcher: Any, vocabulary: int) -> None:
        self._generation = generation
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._consumed = len(generation.token_ids)
        self._shared_size = 0
        self._forced: list[int] = []
        self._forced_start = 0

    def __call__(self, scores: npt.NDArray[Any]) -> None:
        self._catch_up()
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise _refusal("constraint", self._matcher.get_error())
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
        raise RequestError(f"an answer can have only one constraint: send {' or '.join(names)}")
    kind = params.guided_decoding_guide_type
    if kind and not params.guided_decoding_guide and kind != "json":
        raise RequestError("guided_decoding_guide_type needs guided_decoding_guide")
    if kind and names not in ([], ["guided_decoding_guide"]):
        raise RequestError(f"guided_decoding_guide_type conflicts with {names[0]}: leave it out")
    if not names and kind != "json":
        return None
    for name in _CONFLICTING:
        if getattr(params, name):
            raise RequestError(f"a constrained answer conflicts with {name}: leave it out")
    if params.json_object or not names:
        return "json_schema", '{"type":"object"}'
    name = names[0]
    if name == "choice":
        return "regex", "|".join(map(_escape, params.choice))
    text = str(getattr(params, name))
    if len(text.encode()) > _MAX_BYTES:
        raise RequestError(f"{name} has {len(text.encode())} bytes: send at most {_MAX_BYTES}")
    if name == "guided_decoding_guide":
        name = _guide_kind(kind)
    return name, _checked_schema(text) if name == "json_schema" else text


def _guide_kind(kind: str | None) -> str:
    """Return the kind of form for the name that TensorRT-LLM gives a kind of guide."""
    kinds = {"json": "json_schema"} | {k: k for k in ("json_schema", "regex", "ebnf_grammar")}
    if kind not in kinds:
        raise RequestError(f"guided_decoding_guide_type is one of {', '.join(kinds)}, not {kind!r}")
    return kinds[kind]


def _checked_schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"json_schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise RequestError("json_schema takes a JSON object as defined by json-schema.org")
    if _depth(schema) > _MAX_DEPTH:
        raise RequestError(f"json_schema is nested deeper than {_MAX_DEPTH}: make it flatter")
    return text


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


def _refusal(kind: str, message: str) -> RequestError:
    lines: Sequence[str] = [line.strip() for line in message.splitlines() if line.strip()]
    reason = lines[0] if lines else "it cannot be compiled"
    if reason.endswith(":"):
        reason = f"{reason} {lines[-1]}"
    return RequestError(f"the {kind.replace('_', ' ')} cannot be enforced: {reason[:200]}")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "this server cannot constrain answers: install llguidance next to it "
            "(pip install 'llmserve[constrained]')"
        ) from None
    return llguidance
