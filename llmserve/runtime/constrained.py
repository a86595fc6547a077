"""Answers held to a form: a JSON schema, a choice, a regular expression or a grammar.

llguidance says which tokens may come next; it is imported when the first request asks for it.
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

_LONGEST = 65_536
_DEEPEST = 64
_KEPT = 64
# Options that forbid the token which fits, or end an answer where it is not complete.
_CONTRARY = ("ignore_eos", "min_tokens", "bad_words", "end_id")
# A blank, or a new line and its indentation. llguidance's own white space has no end, and small
# models like to write it for ever.
_JSON = {"whitespace_pattern": r"(\n {0,12}| )?"}
_FORMS = ("json_schema", "json_object", "choice", "regex", "grammar", "guided_decoding_guide")

# What scores may be at most, for the bits of a byte: quicker to look up than to choose each.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS = np.where(_BITS, np.inf, -np.inf)

Form = tuple[str, str]
"""What kind of form it is, and the form."""


class Compiler:
    """Makes constraints for the generations of one model; what was compiled last is kept."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> None:
        self._library = _llguidance()
        if not eos_ids:
            raise RequestError("this model has no token that ends an answer: a form has no end")
        written = getattr(tokenizer, "tokenizer_json", lambda: None)()
        if written is None:
            raise RequestError(
                "this model's tokenizer cannot be read by llguidance, so no answer can be held to "
                "a form: it has no tokenizer.json"
            )
        self._table = self._library.LLTokenizer(written, eos_token=sorted(eos_ids))
        self._compiled: OrderedDict[Form, Any] = OrderedDict()

    def constraint(self, generation: Generation, form: Form) -> Constraint:
        """Return what holds a generation to a form, or refuse a form that cannot be had."""
        if form not in self._compiled:
            self._compiled[form] = self._compile(form)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(form)
        return _Held(generation, self._compiled[form].deep_copy(), self._table.vocab_size)

    def _compile(self, form: Form) -> Any:
        matcher = self._library.LLMatcher(self._table, self._grammar(*form), log_level=0)
        if matcher.is_error():
            raise _refusal(form[0], matcher.get_error())
        # What can never end, or begin, is found out at the first mask; later ones are as quick.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise _refusal(form[0], "nothing has this form")
        return matcher

    def _grammar(self, kind: str, text: str) -> Any:
        grammars = self._library.LLMatcher
        if kind == "regex":
            return grammars.grammar_from_regex(text)
        if kind == "json_schema":
            try:
                return grammars.grammar_from_json_schema(text, defaults=_JSON)
            except ValueError as error:
                raise _refusal(kind, str(error)) from None
        if kind == "ebnf_grammar":
            from llguidance.gbnf_to_lark import any_to_lark

            try:
                text = any_to_lark(text)
            except Exception as error:  # its parser raises bare exceptions
                raise _refusal(kind, str(error)) from None
        return grammars.grammar_from_lark(text)


class _Held:
    """One generation's way through its form."""

    def __init__(self, generation: Generation, matcher: Any, vocabulary: int) -> None:
        self._generation = generation
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._read = len(generation.token_ids)
        self._known = 0
        self._run: list[int] = []
        self._run_from = 0

    def __call__(self, scores: npt.NDArray[Any]) -> None:
        self._follow()
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise _refusal("form", self._matcher.get_error())
        # A model can have more scores than its tokenizer has tokens.
        self._known = min(self._vocabulary, scores.size)
        scores[self._known :] = -np.inf
        _keep(scores[: self._known], np.frombuffer(mask, dtype=np.uint32))

    def forced(self) -> Sequence[int]:
        """Return the tokens that come next where the form leaves one choice."""
        at = self._follow() - self._run_from
        # What follows from the middle of a run could be cut into other tokens.
        if self._generation.token_ids[self._run_from :] != self._run[:at] or at >= len(self._run):
            run, self._run_from = self._matcher.compute_ff_tokens(), self._read
            at, self._run = 0, run if all(token < self._known for token in run) else []
        return self._run[at:]

    def _follow(self) -> int:
        """Take in what was chosen, and return how many tokens that is."""
        tokens = self._generation.token_ids
        if len(tokens) > self._read:
            self._matcher.consume_tokens(tokens[self._read :])
            self._read = len(tokens)
        return self._read


def _keep(scores: npt.NDArray[Any], words: npt.NDArray[np.uint32]) -> None:
    """Leave those scores alone whose bits are set; the others become minus infinity."""
    # Seen as booleans, which are found five times as quickly as numbers.
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
    """Return what a request wants its answer held to, None if that is nothing."""
    asked = [name for name in _FORMS if getattr(params, name)]
    if len(asked) > 1:
        raise RequestError(f"an answer is held to one form: send {' or '.join(asked)}")
    kind = params.guided_decoding_guide_type
    if kind and not params.guided_decoding_guide and kind != "json":
        raise RequestError("guided_decoding_guide_type needs guided_decoding_guide")
    if kind and asked not in ([], ["guided_decoding_guide"]):
        raise RequestError(f"guided_decoding_guide_type does not go with {asked[0]}: leave it out")
    if not asked and kind != "json":
        return None
    for name in _CONTRARY:
        if getattr(params, name):
            raise RequestError(f"an answer held to a form cannot go with {name}: leave it out")
    if params.json_object or not asked:
        return "json_schema", '{"type":"object"}'
    name = asked[0]
    if name == "choice":
        return "regex", "|".join(map(_literally, params.choice))
    text = str(getattr(params, name))
    if len(text.encode()) > _LONGEST:
        raise RequestError(f"{name} has {len(text.encode())} bytes, at most {_LONGEST} are taken")
    if name == "guided_decoding_guide":
        name = _guide_kind(kind)
    return name, _checked_schema(text) if name == "json_schema" else text


def _guide_kind(kind: str | None) -> str:
    """The kinds of guides have TensorRT-LLM's names."""
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
        raise RequestError("json_schema takes a JSON object, as json-schema.org has it")
    if _depth(schema) > _DEEPEST:
        raise RequestError(f"json_schema is nested deeper than {_DEEPEST}: make it flatter")
    return text


def _depth(value: Any) -> int:
    """How deep a JSON value is nested, counted without recursion."""
    deepest, level = 0, [value]
    while level:
        deepest += 1
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return deepest


def _literally(word: str) -> str:
    """Return a regular expression for one word, as llguidance and xgrammar both read it."""
    return re.sub(r"[\\^$.|?*+()\[\]{}]", r"\\\g<0>", word)


def _refusal(kind: str, message: str) -> RequestError:
    lines: Sequence[str] = [line.strip() for line in message.splitlines() if line.strip()]
    reason = lines[0] if lines else "it cannot be compiled"
    if reason.endswith(":"):
        reason = f"{reason} {lines[-1]}"
    return RequestError(f"the {kind.replace('_', ' ')} cannot be kept to: {reason[:200]}")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "this server cannot hold answers to a form: install llguidance beside it "
            "(pip install 'llmserve[constrained]')"
        ) from None
    return llguidance
