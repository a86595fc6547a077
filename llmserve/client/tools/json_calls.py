"""Readers of calls whose arguments are JSON: between marks, after a name, or as the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from llmserve.client.tools.python_calls import PythonReader
from llmserve.client.tools.reading import (
    WORD,
    Parsing,
    Reader,
    as_json,
    parse_json,
    partial_length,
)

# These bars are wider than the ASCII character.
DEEPSEEK = "<\uff5ctool▁{}\uff5c>"
_NUMBER = re.compile(r"[:\d]*")
_BARE_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.\-]*)\s*:")
_LONGEST = 1 << 20

Marks = Mapping[str, tuple[str, ...]]


class MarkedCalls(Reader):
    """A call or a list of calls, each an object, after one of several marks.

    ``marks`` are those before a call, each with those that may follow it.
    """

    def __init__(self, marks: Marks, names: frozenset[str]) -> None:
        super().__init__(names)
        self._marks = marks

    def parse(self) -> Parsing[None]:
        while mark := (yield from self._emit_until(*self._marks)):
            if (yield from self._read_calls(",", ";")):
                yield from self._drop(*self._marks[mark])


class FormedCalls(Reader):
    """Calls that are constrained to JSON after a family's own mark, whatever the family writes.

    What follows a call is what the family ends one with, and no content.
    """

    def __init__(self, marks: tuple[str, ...], names: frozenset[str]) -> None:
        super().__init__(names)
        self._marks = marks

    def parse(self) -> Parsing[None]:
        while (yield from self._emit_until(*self._marks)):
            if (yield from self._read_calls()):
                yield from self._skip_until(*self._marks)

    def _skip_until(self, *marks: str) -> Parsing[None]:
        """Forget what comes before the next mark."""
        while not self._ended and not any(mark in self._buffer for mark in marks):
            self._take(len(self._buffer) - max(partial_length(self._buffer, m) for m in marks))
            self._source = ""
            yield
        places = [at for mark in marks if (at := self._buffer.find(mark)) >= 0]
        self._take(min(places, default=len(self._buffer)))
        self._source = ""


@dataclass(frozen=True)
class NamedForm:
    """How a call is written as a name and then its arguments: the marks, in their order."""

    begin: str
    middle: str
    ends: tuple[str, ...]
    before: str = ""
    """A mark before the first call."""
    prefix: str = ""
    """What the model writes before the name of any function."""


class NamedCalls(Reader):
    """A name and its arguments between marks."""

    def __init__(self, form: NamedForm, names: frozenset[str]) -> None:
        super().__init__(names)
        self._form = form

    def parse(self) -> Parsing[None]:
        form = self._form
        marks = (form.before, form.begin) if form.before else (form.begin,)
        while mark := (yield from self._emit_until(*marks)):
            if mark == form.before:
                yield from self._skip_space()
                if not (yield from self._take_prefix(form.begin)):
                    self._emit_source_as_text()
                    continue
            if (yield from self._read_named()):
                yield from self._drop(*form.ends)
            else:
                self._emit_source_as_text()

    def _read_named(self) -> Parsing[bool]:
        yield from self._skip_space()
        name = yield from self._take_match(WORD)
        if name not in self._names:
            name = name.removeprefix(self._form.prefix)
        if self._form.prefix:
            yield from self._take_match(_NUMBER)
        yield from self._skip_space()
        if not (yield from self._take_prefix(self._form.middle)):
            return False
        return (yield from self._read_arguments(name))


class Llama(PythonReader):
    """``{"name": …, "parameters": {…}}`` or ``[name(key=value)]``, as the answer or marked."""

    def parse(self) -> Parsing[None]:
        if (yield from self._skip_space()) not in ("{", "["):
            self._emit_source_as_text()
            if not (yield from self._emit_until("<|python_tag|>", "<|python_start|>")):
                return
        if (yield from self._begins_python()):
            yield from self._read_python_calls()
        else:
            yield from self._read_calls(";", ",")
        yield from self._skip_space()
        if (yield from self._take_prefix("<|python_end|>")):
            self._source = ""
        self._emit_source_as_text()
        yield from self._emit_until()


class Mistral(Reader):
    """``[TOOL_CALLS]`` and a list, or each call as ``[TOOL_CALLS]name[ARGS]{…}``."""

    def parse(self) -> Parsing[None]:
        while (yield from self._emit_until("[TOOL_CALLS]")):
            if (yield from self._skip_space()) in ("[", "{"):
                yield from self._read_calls()
                continue
            name = yield from self._take_match(WORD)
            if (yield from self._take_prefix("[CALL_ID]")):
                yield from self._take_match(WORD)
            yield from self._take_prefix("[ARGS]")
            if (yield from self._read_arguments(name)):
                self._source = ""
            else:
                self._emit_source_as_text()


class DeepSeek(Reader):
    """Calls between special marks: V3 uses a fence, V3.1 does not."""

    def parse(self) -> Parsing[None]:
        first, begin, middle, end, last = (
            DEEPSEEK.format(mark)
            for mark in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
        )
        while mark := (yield from self._emit_until(first, begin)):
            if mark == first:
                yield from self._skip_space()
                if not (yield from self._take_prefix(begin)):
                    self._emit_source_as_text()
                    continue
            name = yield from self._take_match(WORD)
            if not (yield from self._take_prefix(middle)):
                self._emit_source_as_text()
                continue
            if (yield from self._skip_space()) != "{":
                # That was the kind of tool; its name follows.
                name = yield from self._take_match(WORD)
                yield from self._skip_space()
                yield from self._take_prefix("```json")
            if not (yield from self._read_arguments(name)):
                self._emit_source_as_text()
                continue
            yield from self._drop("```", end, last)


class Gemma(Reader):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,…}<tool_call|>``: JSON with other quotes."""

    def parse(self) -> Parsing[None]:
        while (yield from self._emit_until("<|tool_call>")):
            if not (yield from self._take_prefix("call:")):
                self._emit_source_as_text()
                continue
            name = yield from self._take_match(WORD)
            written = yield from self._take_until("<tool_call|>", _LONGEST)
            arguments = None if written is None else _with_usual_quotes(written)
            if arguments is None or name not in self._names:
                self._emit_source_as_text()
                continue
            self._emit("name", name)
            self._emit("arguments", arguments)
            self._emit("end")


def _with_usual_quotes(written: str) -> str | None:
    parts = written.split('<|"|>')
    for at, part in enumerate(parts):
        quoted = json.dumps(part, ensure_ascii=False)
        parts[at] = quoted if at % 2 else _BARE_KEY.sub(r'\1"\2":', part)
    value = parse_json("".join(parts), dict)
    try:
        return None if value is None else as_json(value)
    except ValueError:
        return None  # A number that JSON does not have.


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
                yield from self._drop(closings[mark])


class Arguments(Reader):
    """An answer that is constrained to the arguments of a single call."""

    def parse(self) -> Parsing[None]:
        (name,) = self._names
        if not (yield from self._read_arguments(name)):
            self._emit_source_as_text()
        yield from self._emit_until()
