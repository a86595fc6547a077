"""What all readers of answers have in common.

A reader is a coroutine over the text, which yields when it needs more. Text that looks like a call
but does not call one of the offered tools remains text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from llmserve.client.tools.parts import Kind, ToolPart

T = TypeVar("T")
Parsing = Generator[None, None, T]

_MAX_WORD = 256
WORD = re.compile(r"[\w.\-]*")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_SCALAR = re.compile(r"[\w.+\-]*")
# The structural characters of JSON, unless escaped; a lone backslash is an escape cut in two.
_JSON_MARK = re.compile(r'\\.|\\|["{}\[\]]', re.DOTALL)
# What families call the two parts of a call that is an object.
_NAMES, _ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")


class Reader:
    """Base class of all readers; each implements :meth:`parse`."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._buffer = ""
        self._ended = False
        self._source = ""
        self._parts: list[ToolPart] = []
        self._parsing = self.parse()

    def read(self, text: str) -> Sequence[ToolPart]:
        self._buffer += text
        return self._run()

    def end(self) -> Sequence[ToolPart]:
        self._ended = True
        return self._run()

    def parse(self) -> Parsing[None]:
        raise NotImplementedError

    def _run(self) -> Sequence[ToolPart]:
        next(self._parsing, None)
        parts, self._parts = self._parts, []
        return parts

    # Elements of all formats

    def _take(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        self._source += text
        return text

    def _emit(self, kind: Kind, text: str = "") -> None:
        self._parts.append(ToolPart(kind, text, self._source))
        self._source = ""

    def _emit_source_as_text(self) -> None:
        if self._source:
            self._emit("text", self._source)

    def _emit_until(self, *marks: str, kind: Kind = "text") -> Parsing[str | None]:
        """Emit the text up to a mark and take the mark; return None if the answer ends first."""
        while True:
            matches = [(at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
            end, mark = min(matches, default=(len(self._buffer), None))
            if not matches and not self._ended:
                end -= max((partial_length(self._buffer, mark) for mark in marks), default=0)
            if text := self._take(end):
                self._emit(kind, text)
            if mark:
                self._take(len(mark))
                return mark
            if self._ended:
                return None
            yield

    def _take_prefix(self, *prefixes: str) -> Parsing[str | None]:
        """Take the first of these prefixes that matches; longer ones must come first."""
        while True:
            for prefix in prefixes:
                if self._buffer.startswith(prefix):
                    return self._take(len(prefix))
                if prefix.startswith(self._buffer) and not self._ended:
                    break
            else:
                return None
            yield

    def _take_until(self, mark: str, longest: int = _MAX_WORD) -> Parsing[str | None]:
        """Take a short text and the mark after it; return None if it does not come."""
        while (at := self._buffer.find(mark)) < 0 or at > longest:
            if self._ended or at > longest or len(self._buffer) > longest + len(mark):
                return None
            yield
        text = self._take(at)
        self._take(len(mark))
        return text

    def _drop(self, *marks: str) -> Parsing[None]:
        """Take white space and these marks, as far as they come next, and forget them."""
        for mark in marks:
            yield from self._skip_space()
            yield from self._take_prefix(mark)
        self._source = ""

    def _skip_space(self) -> Parsing[str]:
        """Take white space, and return the next character."""
        while True:
            self._take(len(self._buffer) - len(self._buffer.lstrip()))
            if self._buffer or self._ended:
                return self._buffer[:1]
            yield

    def _take_match(self, pattern: re.Pattern[str]) -> Parsing[str]:
        """Take the longest match, which is certain once another character follows it."""
        while True:
            match = pattern.match(self._buffer)
            end = match.end() if match else 0
            if end < len(self._buffer) or self._ended or end > _MAX_WORD:
                return self._take(min(end, _MAX_WORD))
            yield

    def _take_string(self) -> Parsing[str | None]:
        while self._buffer[:1] in ('"', ""):
            if (match := _STRING.match(self._buffer)) and match.end() <= _MAX_WORD:
                text: str | None = parse_json(self._take(match.end()), str)
                return text
            if self._ended or len(self._buffer) > _MAX_WORD:
                return None
            yield
        return None

    def _take_nested(self, *, emit: bool) -> Parsing[str | None]:
        """Take an object or a list, emitting it piece by piece; return None if it is invalid."""
        brackets: list[str] = []
        quoted = False
        whole = ""
        while True:
            end, complete = len(self._buffer), False
            for match in _JSON_MARK.finditer(self._buffer):
                mark = match[0]
                if mark == "\\":
                    end = match.start()
                elif mark == '"':
                    quoted = not quoted
                elif quoted or mark[0] == "\\":
                    pass
                elif mark in "{[":
                    brackets.append(mark)
                elif not brackets or brackets.pop() + mark not in ("{}", "[]"):
                    end, complete = match.start(), True
                    break
                elif not brackets:
                    end, complete = match.end(), True
                    break
            text = self._take(end)
            whole += text
            if emit and text:
                self._emit("arguments", text)
            if complete or self._ended:
                return whole if parse_json(whole, (dict, list)) is not None else None
            yield

    def _skip_value(self) -> Parsing[bool]:
        """Skip a value that does not matter, such as an id; return whether there was one."""
        if self._buffer[:1] == '"':
            return (yield from self._take_string()) is not None
        if self._buffer[:1] in ("{", "["):
            return (yield from self._take_nested(emit=False)) is not None
        return bool((yield from self._take_match(_SCALAR)))

    # Calls

    def _read_call(self) -> Parsing[bool]:
        """Read a call that is an object with a name and arguments; return whether it is one."""
        name = arguments = None
        emitted = False
        yield from self._skip_space()
        if not (yield from self._take_prefix("{")):
            return False
        while True:
            yield from self._skip_space()
            key = yield from self._take_string()
            yield from self._skip_space()
            if key is None or not (yield from self._take_prefix(":")):
                return False
            yield from self._skip_space()
            if key in _NAMES and name is None:
                name = yield from self._take_string()
                if name not in self._names:
                    return False
            elif key in _ARGUMENTS and arguments is None:
                if self._buffer[:1] != "{":
                    return False
                if emitted := name is not None:
                    self._emit("name", name)
                arguments = yield from self._take_nested(emit=emitted)
                if arguments is None:
                    return self._abandon_call(emitted)
            elif not (yield from self._skip_value()):
                return self._abandon_call(emitted)
            yield from self._skip_space()
            if (yield from self._take_prefix("}")):
                break
            if not (yield from self._take_prefix(",")):
                return self._abandon_call(emitted)
        if name is None:
            return False
        if not emitted:
            self._emit("name", name)
            self._emit("arguments", "{}" if arguments is None else arguments)
        self._emit("end")
        return True

    def _abandon_call(self, emitted: bool) -> bool:
        """Leave a call without an end, if its start has been emitted."""
        if emitted:
            self._emit("arguments")
        return False

    def _read_arguments(self, name: str) -> Parsing[bool]:
        """Read the arguments of a call whose name precedes them."""
        if name not in self._names or (yield from self._skip_space()) != "{":
            return False
        self._emit("name", name)
        if (yield from self._take_nested(emit=True)) is None:
            return self._abandon_call(True)
        self._emit("end")
        return True

    def _read_calls(self, *separators: str) -> Parsing[bool]:
        """Read a list of calls, or calls with separators; return whether all were calls."""
        yield from self._skip_space()
        is_list = yield from self._take_prefix("[")
        while (yield from self._read_call()):
            yield from self._skip_space()
            if not (yield from self._take_prefix(*((",",) if is_list else separators))):
                if is_list:
                    yield from self._take_prefix("]")
                self._source = ""
                return True
        self._emit_source_as_text()
        return False


def partial_length(text: str, mark: str) -> int:
    """Return how many characters at the end of the text may be the start of the mark."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


def as_json(value: Any) -> str:
    """Return a value as JSON that can be sent, or raise if it has no place in JSON."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Python's text has the halves of a character apart, if a model has written them so.
        return json.dumps(value)
    return text


def parse_json(text: str, kind: Any) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, kind) else None
