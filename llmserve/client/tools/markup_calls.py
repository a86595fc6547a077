"""A reader of calls that are written as markup, with an element for each argument."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmserve.client.tools.reading import WORD, Parsing, Reader, as_json, partial_length

_WORDS = {"true": True, "True": True, "false": False, "False": False,
          "null": None, "None": None}  # fmt: skip
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null",
          list: "array", dict: "object"}  # fmt: skip
_MAX_DEPTH = 8


@dataclass(frozen=True)
class Markup:
    """How a family writes a call: the texts around its name, and around each argument."""

    begin: str
    name: tuple[str, str]
    """Before and after the name."""
    argument: tuple[str, str, str]
    """Before the name of an argument, between it and its value, and after that."""
    end: str
    close: str
    """After the last call."""
    between: str = ""
    """What else is before a value, after white space."""


class MarkupCalls(Reader):
    """Calls in one form of markup."""

    def __init__(self, form: Markup, names: frozenset[str]) -> None:
        super().__init__(names)
        self._form = form

    def parse(self) -> Parsing[None]:
        form = self._form
        while (yield from self._emit_until(form.begin)):
            count = 0
            while (yield from self._read_call_element()):
                count += 1
            if count:
                yield from self._drop(form.close)
            else:
                self._emit_source_as_text()

    def _read_call_element(self) -> Parsing[bool]:
        form, kept = self._form, ""
        yield from self._skip_space()
        before, after = form.name
        if before and not (yield from self._take_prefix(before)):
            return False
        name = yield from self._take_match(WORD)
        if name not in self._names:
            return False
        kept = yield from self._skip_space()
        if after and not (kept and (yield from self._take_prefix(after))):
            return False
        schema = getattr(self._names, "schemas", {}).get(name, {})
        self._emit("name", name)
        if not (yield from self._read_argument_elements(schema)):
            return self._abandon_call(True)
        self._emit("end")
        return True

    def _read_argument_elements(self, schema: Mapping[str, Any]) -> Parsing[bool]:
        form, separator = self._form, "{"
        while True:
            yield from self._skip_space()
            if (yield from self._take_prefix(form.end)):
                self._emit("arguments", "{}" if separator == "{" else "}")
                return True
            before, middle, _ = form.argument
            if not (yield from self._take_prefix(before)):
                return False
            key = yield from self._take_until(middle)
            if key is None:
                return False
            if form.between:
                yield from self._skip_space()
                if not (yield from self._take_prefix(form.between)):
                    return False
            opening = f"{separator}{as_json(key)}: "
            separator = ", "
            if not (yield from self._read_value(opening, kinds_of(schema, key))):
                return False

    def _read_value(self, opening: str, kinds: frozenset[str]) -> Parsing[bool]:
        """Read a value and its end; text is passed on as it comes."""
        close = self._form.argument[2]
        yield from self._take_prefix("\n")
        streams = kinds == {"string"}
        if streams:
            self._emit("arguments", f'{opening}"')
        value = ""
        while True:
            at = self._buffer.find(close)
            if at >= 0:
                end = at
            elif self._ended:
                return False
            else:
                # The line break before the end is no part of the value.
                held = max(partial_length(self._buffer, mark) for mark in (close, f"\n{close}"))
                end = len(self._buffer) - held
            text = self._take(end)
            text = text.removesuffix("\n") if at >= 0 else text
            if streams and text:
                self._emit("arguments", as_json(text)[1:-1])
            value += text
            if at >= 0:
                self._take(len(close))
                written = '"' if streams else opening + as_json(value_of(value, kinds))
                self._emit("arguments", written)
                return True
            yield


def kinds_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the kinds of value that a schema of arguments allows for one; none if unknown."""
    properties = schema.get("properties")
    part = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_kinds(part, schema, _MAX_DEPTH, {}))


def _kinds(part: Any, root: Mapping[str, Any], depth: int, known: dict[str, set[str]]) -> set[str]:
    """Return the kinds of a part; ``known`` has those of names, each of which is followed once."""
    if not isinstance(part, Mapping) or not depth:
        return set()
    if isinstance(reference := part.get("$ref"), str):
        places = root.get("$defs") or root.get("definitions")
        name = reference.rpartition("/")[2]
        if name not in known:
            known[name] = set()
            found = places.get(name) if isinstance(places, Mapping) else None
            known[name] = _kinds(found, root, depth - 1, known)
        return known[name]
    kind = part.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, (list, tuple)):
        return {name for name in kind if isinstance(name, str)}
    values = [part["const"]] if "const" in part else part.get("enum")
    if isinstance(values, (list, tuple)):
        return {_KINDS.get(type(value), "") for value in values}
    several = part.get("anyOf") or part.get("oneOf")
    if not isinstance(several, (list, tuple)):
        return set()
    found_kinds = [_kinds(one, root, depth - 1, known) for one in several]
    return set().union(*found_kinds) if all(found_kinds) else set()


def value_of(text: str, kinds: frozenset[str]) -> Any:
    """Return the value that a text stands for, given the kinds that are allowed."""
    if kinds == {"string"}:
        return text
    for read in (_word, json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            # What Python writes may have no place in JSON, such as a set.
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        kind = _KINDS.get(type(value), "")
        if kind in kinds or (kind == "integer" and "number" in kinds):
            return value
        if not kinds and kind != "string":
            return value
    return text


def _word(text: str) -> Any:
    if text not in _WORDS:
        raise ValueError(text)
    return _WORDS[text]
