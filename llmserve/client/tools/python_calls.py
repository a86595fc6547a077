"""Readers of calls that are written in Python: ``[name(key='value')]``."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from llmserve.client.tools.reading import WORD, Parsing, Reader, as_json

_MARK = re.compile(r"""\\.|\\|['"(){}\[\]]""", re.DOTALL)
_MAX_DEPTH = 64
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonReader(Reader):
    """What readers of calls in Python share."""

    def _begins_python(self) -> Parsing[bool]:
        """Return whether a list of calls comes next, and not JSON; nothing is taken."""
        while True:
            text = self._buffer.lstrip()
            inner = text[1:].lstrip()
            if inner or self._ended or text not in ("", "["):
                return text[:1] == "[" and bool(re.match(r"[A-Za-z_]", inner))
            yield

    def _read_python_calls(self) -> Parsing[bool]:
        """Read calls with commas or line breaks between them, in brackets or not."""
        yield from self._skip_space()
        is_list = yield from self._take_prefix("[")
        while (yield from self._read_python_call()):
            yield from self._skip_space()
            if (yield from self._take_prefix(",")):
                continue
            if is_list:
                if (yield from self._take_prefix("]")):
                    self._source = ""
                    return True
                break
            if not re.match(r"[A-Za-z_]", self._buffer):
                return True
        self._emit_source_as_text()
        return False

    def _read_python_call(self) -> Parsing[bool]:
        yield from self._skip_space()
        name = yield from self._take_match(WORD)
        if name not in self._names or not (yield from self._take_prefix("(")):
            return False
        written = yield from self._take_brackets()
        arguments = None if written is None else _arguments(written)
        if arguments is None:
            return False
        self._emit("name", name)
        self._emit("arguments", arguments)
        self._emit("end")
        return True

    def _take_brackets(self) -> Parsing[str | None]:
        """Take what is in a bracket that is open, with its end; None if there is none."""
        open_brackets, quote, whole = ["("], "", ""
        while True:
            end, complete = len(self._buffer), False
            for match in _MARK.finditer(self._buffer):
                mark = match[0]
                if mark == "\\":
                    end = match.start()
                elif quote:
                    quote = "" if mark == quote else quote
                elif mark in ("'", '"'):
                    quote = mark
                elif mark in ("(", "[", "{"):
                    open_brackets.append(mark)
                elif mark in (")", "]", "}"):
                    complete = open_brackets.pop() + mark not in ("()", "[]", "{}")
                    if complete or not open_brackets:
                        end = match.end()
                        complete = True
                        break
            whole += self._take(end)
            if complete or self._ended:
                return whole if complete and not open_brackets else None
            if len(open_brackets) > _MAX_DEPTH:
                return None
            yield


class PythonCalls(PythonReader):
    """``[name(key=value), …]`` after one of several marks, or as the answer."""

    def __init__(self, marks: dict[str, tuple[str, ...]], names: frozenset[str]) -> None:
        super().__init__(names)
        self._marks = marks

    def parse(self) -> Parsing[None]:
        if (yield from self._begins_python()):
            yield from self._read_python_calls()
        while mark := (yield from self._emit_until(*self._marks)):
            if (yield from self._read_python_calls()):
                yield from self._drop(*self._marks[mark])


def _arguments(written: str) -> str | None:
    """Return the arguments of a call as JSON; None if they are no values with names."""
    try:
        with warnings.catch_warnings():
            # A model's backslashes are not ours to warn of.
            warnings.simplefilter("ignore")
            call = ast.parse(f"f({written}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {keyword.arg: _value(keyword.value) for keyword in call.keywords}
        return None if None in values else as_json(values)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def _value(node: ast.expr) -> Any:
    """Return the value of a literal, of JSON's constants as well."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("not an object of JSON")
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, (str, int, float, bool, type(None))):
        raise ValueError("not a value of JSON")
    return value
