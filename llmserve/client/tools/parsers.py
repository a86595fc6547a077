"""Parsers for the tool call formats of model families; they read an answer incrementally.

A reader is a coroutine over the text, which yields when it needs more. Text that looks like a call
but does not call one of the offered tools remains text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from llmserve.client.tools.parts import ToolPart
from llmserve.plugins.roles import ToolParser

T = TypeVar("T")
Parsing = Generator[None, None, T]

_MAX_WORD = 256
_WORD = re.compile(r"[\w.\-]*")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_SCALAR = re.compile(r"[\w.+\-]*")
# These bars are wider than the ASCII character.
_DEEPSEEK = "<\uff5ctool▁{}\uff5c>"
# The structural characters of JSON, unless escaped; a lone backslash is an escape cut in two.
_JSON_MARK = re.compile(r'\\.|\\|["{}\[\]]', re.DOTALL)


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

    def _emit(self, kind: Any, text: str = "") -> None:
        self._parts.append(ToolPart(kind, text, self._source))
        self._source = ""

    def _emit_source_as_text(self) -> None:
        if self._source:
            self._emit("text", self._source)

    def _emit_until(self, *marks: str) -> Parsing[str | None]:
        """Emit the text up to a mark and take the mark; return None if the answer ends first."""
        while True:
            matches = [(at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
            end, mark = min(matches, default=(len(self._buffer), None))
            if not matches and not self._ended:
                end -= max((_partial_length(self._buffer, mark) for mark in marks), default=0)
            if text := self._take(end):
                self._emit("text", text)
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
                text: str | None = _parse_json(self._take(match.end()), str)
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
                return whole if _parse_json(whole, (dict, list)) is not None else None
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
            if key == "name" and name is None:
                name = yield from self._take_string()
                if name not in self._names:
                    return False
            elif key in ("arguments", "parameters") and arguments is None:
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


class Hermes(Reader):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Hermes and Qwen write it."""

    def parse(self) -> Parsing[None]:
        while (yield from self._emit_until("<tool_call>")):
            if (yield from self._read_call()):
                yield from self._skip_space()
                yield from self._take_prefix("</tool_call>")
                self._source = ""
            else:
                self._emit_source_as_text()


class Llama(Reader):
    """``{"name": …, "parameters": {…}}`` as the answer, or after ``<|python_tag|>``."""

    def parse(self) -> Parsing[None]:
        if (yield from self._skip_space()) not in ("{", "["):
            self._emit_source_as_text()
            if not (yield from self._emit_until("<|python_tag|>")):
                return
        yield from self._read_calls(";", ",")
        yield from self._emit_until()


class Mistral(Reader):
    """``[TOOL_CALLS]`` and a list, or each call as ``[TOOL_CALLS]name[ARGS]{…}``."""

    def parse(self) -> Parsing[None]:
        while (yield from self._emit_until("[TOOL_CALLS]")):
            if (yield from self._skip_space()) in ("[", "{"):
                yield from self._read_calls()
                continue
            name = yield from self._take_match(_WORD)
            if (yield from self._take_prefix("[CALL_ID]")):
                yield from self._take_match(_WORD)
            yield from self._take_prefix("[ARGS]")
            if (yield from self._read_arguments(name)):
                self._source = ""
            else:
                self._emit_source_as_text()


class DeepSeek(Reader):
    """Calls between special marks: V3 uses a fence, V3.1 does not."""

    def parse(self) -> Parsing[None]:
        first, begin, middle, end, last = (
            _DEEPSEEK.format(mark)
            for mark in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
        )
        while mark := (yield from self._emit_until(first, begin)):
            if mark == first:
                yield from self._skip_space()
                if not (yield from self._take_prefix(begin)):
                    self._emit_source_as_text()
                    continue
            name = yield from self._take_match(_WORD)
            if not (yield from self._take_prefix(middle)):
                self._emit_source_as_text()
                continue
            if (yield from self._skip_space()) != "{":
                # That was the kind of tool; its name follows.
                name = yield from self._take_match(_WORD)
                yield from self._skip_space()
                yield from self._take_prefix("```json")
            if not (yield from self._read_arguments(name)):
                self._emit_source_as_text()
                continue
            for closing in ("```", end, last):
                yield from self._skip_space()
                yield from self._take_prefix(closing)
            self._source = ""


class Json(Reader):
    """JSON calls as the answer, in a fence or between tags, as models write that learnt no format.

    What llmserve tells a model whose template has no place for tools is the form with tags.
    """

    def parse(self) -> Parsing[None]:
        if (yield from self._skip_space()) in ("{", "["):
            yield from self._read_calls(",", ";")
        else:
            self._emit_source_as_text()
        closings = {"<tool_call>": "</tool_call>", "```": "```"}
        while mark := (yield from self._emit_until(*closings)):
            if mark == "```":
                yield from self._take_prefix("json")
            if (yield from self._read_calls(",", ";")):
                yield from self._skip_space()
                yield from self._take_prefix(closings[mark])
                self._source = ""


class Arguments(Reader):
    """An answer that is constrained to the arguments of a single call."""

    def parse(self) -> Parsing[None]:
        (name,) = self._names
        if not (yield from self._read_arguments(name)):
            self._emit_source_as_text()
        yield from self._emit_until()


def _partial_length(text: str, mark: str) -> int:
    """Return how many characters at the end of the text may be the start of the mark."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


def _parse_json(text: str, kind: Any) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, kind) else None


def _template_with(rank: int, *marks: str, without: str = "\0") -> Any:
    return lambda template: (
        rank if without not in template and any(mark in template for mark in marks) else 0
    )


PARSERS = [
    ToolParser(
        name="hermes",
        summary="Hermes, Qwen 2.5 and 3: JSON in <tool_call>",
        reader=Hermes,
        # Qwen3-Coder uses the same mark around XML.
        suits=_template_with(10, "<tool_call>", without="<function="),
    ),
    ToolParser(
        name="llama3",
        summary="Llama 3.1 to 3.3: JSON with parameters",
        reader=Llama,
        suits=_template_with(10, "<|python_tag|>", '"parameters": '),
    ),
    ToolParser(
        name="mistral",
        summary="Mistral: [TOOL_CALLS]",
        reader=Mistral,
        suits=_template_with(20, "[TOOL_CALLS]"),
    ),
    ToolParser(
        name="deepseek",
        summary="DeepSeek R1, V3 and V3.1: special marks",
        reader=DeepSeek,
        suits=_template_with(20, _DEEPSEEK.format("call▁begin")),
    ),
    ToolParser(
        name="generic",
        summary="Any other model: JSON alone, in a fence or in <tool_call>",
        reader=Json,
        suits=_template_with(1, ""),
    ),
]
"""The built-in parsers; ``generic`` is for templates that no other parser suits."""
