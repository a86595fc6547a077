"""Decides in a process of its own which constraints may be compiled.

A few bytes can keep llguidance busy for minutes, take all memory, or overflow its stack, which
ends the process. So each constraint is first compiled in a :class:`LimitedProcess`; only what
stays within its limits is compiled in the model's process as well, with the same effort.

The module is also the script of that process, which has no packages but llguidance.
"""

from __future__ import annotations

import json
import resource
import runpy
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

CPU_SECONDS = 0.1
"""The processor time that a constraint may take. A large schema takes 0.01."""
_WALL_SECONDS = 3.0
_MEMORY = 64 << 20
# A thread of the model's process has at least 2 MiB, and other frames below.
_STACK = 1 << 20
# What llguidance checks itself. At each token, it may create this much of the automaton: about
# 4 ms of work. The states are what a constraint may grow to, up to 2 kB each.
LIMITS = {"initial_lexer_fuel": 100_000, "step_lexer_fuel": 50_000, "max_lexer_states": 20_000}
# A space, or a line break and its indentation. llguidance's default allows unlimited whitespace,
# and small models tend to write it forever.
_JSON_DEFAULTS = {"whitespace_pattern": r"(\n {0,12}| )?"}
# llguidance's own dates have a 29th of February in each year.
_YEAR = r"(\d{3}[1-9]|\d\d[1-9]\d|\d[1-9]\d\d|[1-9]\d{3})"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
_DAY = (
    rf"({_YEAR}-(0[13-9]|1[0-2])-\d\d|{_YEAR}-02-([01]\d|2[0-8])"
    rf"|(\d\d{_FOURTH}|{_FOURTH}00)-02-29)"
)
_DAYS = {"date": f"^{_DAY}$", "date-time": f"^{_DAY}"}
# Their values have schemas by names of the user's.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Their values are no schemas.
_VALUES = ("const", "enum", "default", "examples")

_ONE_OF = (
    "oneOf: a value may be of two of its schemas, as far as can be told: send anyOf, or give each "
    "a required property with a const of its own"
)

Rewrite = Callable[[Any], Any]
"""Returns a schema of the same meaning in words that can be enforced."""


class UnenforceableError(Exception):
    """The constraint cannot be compiled, or not within the limits."""


def compiled(library: Any, table: Any, grammar: str) -> Any:
    """Return llguidance's matcher for a grammar."""
    limits = library.LLParserLimits(**LIMITS)
    matcher = library.LLMatcher(table, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise UnenforceableError(matcher.get_error())
    # The first mask reveals a form that can never begin or end. It also does most of the work.
    matcher.compute_bitmask()
    if matcher.is_error():
        error = matcher.get_error()
        large = "too many" in error or "too big" in error
        raise UnenforceableError("it is too large" if large else "no text matches it")
    return matcher


class Judge:
    """The process that decides, for one tokenizer. It ends with the process that started it."""

    def __init__(self, tokenizer_json: str, eos_token: int, library: Path) -> None:
        # In the process itself, this module is in no package.
        from llmserve.runtime.answer.limited_process import LimitedProcess, Limits

        limits = Limits(CPU_SECONDS, _WALL_SECONDS, _MEMORY, _STACK)
        setup = {"tokenizer": tokenizer_json, "eos": eos_token}
        self._process = LimitedProcess(__file__, library, limits, setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def grammar(self, kind: str, text: str) -> tuple[str, int]:
        """Return the grammar of a form that may be compiled, and the bytes that it takes then.

        Raise :class:`UnenforceableError` for any other form, and :class:`OSError` if the process
        has ended.
        """
        from llmserve.runtime.answer.limited_process import TooLargeError, TooSlowError

        try:
            answer, _ = self._process.ask([kind, text])
        except TooSlowError:
            raise UnenforceableError("compiling it takes too long") from None
        except TooLargeError:
            raise UnenforceableError("it is too large") from None
        if "error" in answer:
            raise UnenforceableError(answer["error"])
        return str(answer["grammar"]), int(answer["bytes"])

    def close(self) -> None:
        self._process.close()


def prepare(setup: Mapping[str, Any]) -> Callable[[Any, bytes], tuple[Mapping[str, Any], bytes]]:
    """Return what judges a form; it is called in a process that has the limits."""
    import llguidance

    table = llguidance.LLTokenizer(setup["tokenizer"], eos_token=setup["eos"])
    # It is run as a script, which is in no package.
    rewrite = runpy.run_path(str(Path(__file__).with_name("rewriting.py")))["enforceable"]

    def judge(form: Any, _: bytes) -> tuple[Mapping[str, Any], bytes]:
        return _judged(llguidance, table, rewrite, *form), b""

    return judge


def _judged(library: Any, table: Any, rewrite: Rewrite, kind: str, text: str) -> Mapping[str, Any]:
    """Compile a form and return its grammar, or why it cannot be enforced."""
    resident = _resident()
    try:
        try:
            grammar = grammar_of(library.LLMatcher, rewrite, kind, text)
            matcher = compiled(library, table, grammar)
            answer = {"grammar": grammar, "bytes": max(0, _resident() - resident)}
            del matcher
            return answer
        except UnenforceableError:
            if kind == "json_schema" and (as_any := _with_any_of(rewrite, text)):
                compiled(library, table, grammar_of(library.LLMatcher, rewrite, kind, as_any))
                raise UnenforceableError(_ONE_OF) from None
            raise
    except UnenforceableError as error:
        return {"error": str(error)}


def _resident() -> int:
    """Return the bytes of this process that are in memory."""
    pages = Path("/proc/self/statm").read_bytes().split()
    return int(pages[1]) * resource.getpagesize()


def grammar_of(grammars: Any, rewrite: Rewrite, kind: str, text: str) -> str:
    """Return a form as llguidance's grammar."""
    if kind == "regex":
        return str(grammars.grammar_from_regex(text))
    if kind == "json_schema":
        try:
            text = _with_leap_years(_rewritten(rewrite, text))
            grammar = str(grammars.grammar_from_json_schema(text, defaults=_JSON_DEFAULTS))
        except ValueError as error:
            raise UnenforceableError(str(error)) from None
        _check_keys(json.loads(text))
        return grammar
    if kind == "ebnf_grammar":
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except Exception as error:  # its parser raises bare exceptions
            raise UnenforceableError(str(error)) from None
    return str(grammars.grammar_from_lark(text))


def _rewritten(rewrite: Rewrite, text: str) -> str:
    """Return a schema in the words that can be enforced; a malformed one as it is."""
    schema = json.loads(text)
    with suppress(TypeError, AttributeError, ValueError, KeyError):
        changed = rewrite(schema)
        return text if changed == schema else json.dumps(changed)
    return text


def _with_any_of(rewrite: Rewrite, text: str) -> str:
    """Return a schema with anyOf for each oneOf that is left; nothing if there is none."""
    schema, found = json.loads(_rewritten(rewrite, text)), False
    for part in _schemas(schema):
        if isinstance(branches := part.pop("oneOf", None), list):
            part["allOf"] = [*part.get("allOf", ()), {"anyOf": branches}]
            found = True
    return json.dumps(schema) if found else ""


def _with_leap_years(text: str) -> str:
    """Have dates of the 29th of February in leap years only, and none in a year 0."""
    schema, found = json.loads(text), False
    for part in _schemas(schema):
        kind, others = part.get("format"), part.get("allOf", [])
        if isinstance(kind, str) and kind in _DAYS and isinstance(others, list):
            part["allOf"] = [*others, {"pattern": _DAYS[kind]}]
            found = True
    return json.dumps(schema) if found else text


def _check_keys(schema: Any) -> None:
    """Refuse a schema that counts keys of any name: its grammar lets one key come twice."""
    for part in _schemas(schema):
        least, named = part.get("minProperties"), part.get("required")
        is_open = part.get("additionalProperties") is not False or "patternProperties" in part
        known = len({*named}) if isinstance(named, list) else 0
        if isinstance(least, (int, float)) and least > max(1, known) and is_open:
            raise UnenforceableError("minProperties above 1 needs additionalProperties false")


def _schemas(schema: Any) -> list[dict[str, Any]]:
    """Return a schema and all that are in it."""
    found, rest = [], [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, list):
            rest += part
        elif isinstance(part, dict):
            found.append(part)
            for name, value in part.items():
                if name in _BY_NAME and isinstance(value, dict):
                    rest += value.values()
                elif name not in _VALUES:
                    rest.append(value)
    return found
