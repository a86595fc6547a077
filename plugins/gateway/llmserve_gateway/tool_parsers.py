"""How families of models write that they call tools, each read as it comes.

A reader is a coroutine over the text: it yields where it needs more. What turns out to be no call
of a tool that was offered is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from llmserve.plugin import ToolParser, ToolPart

T = TypeVar("T")
Wait = Generator[None, None, T]

_LONGEST_WORD = 256
_WORD = re.compile(r"[\w.\-]*")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_SCALAR = re.compile(r"[\w.+\-]*")
# Its bars are wider than others.
_DEEPSEEK = "<\uff5ctool▁{}\uff5c>"
# What opens, closes or quotes in JSON; what is escaped does not, and an escape may be cut in two.
_NOTABLE = re.compile(r'\\.|\\|["{}\[\]]', re.DOTALL)


class Reader:
    """What the families have in common; each has its own :meth:`answer`."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._left = ""
        self._ended = False
        self._source = ""
        self._parts: list[ToolPart] = []
        self._steps = self.answer()

    def read(self, text: str) -> Sequence[ToolPart]:
        self._left += text
        return self._run()

    def end(self) -> Sequence[ToolPart]:
        self._ended = True
        return self._run()

    def answer(self) -> Wait[None]:
        raise NotImplementedError

    def _run(self) -> Sequence[ToolPart]:
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    # What every form of a call is made of

    def _take(self, length: int) -> str:
        taken, self._left = self._left[:length], self._left[length:]
        self._source += taken
        return taken

    def _say(self, kind: Any, text: str = "") -> None:
        self._parts.append(ToolPart(kind, text, self._source))
        self._source = ""

    def _give_up(self) -> None:
        """Let what was no call be text."""
        if self._source:
            self._say("text", self._source)

    def _until(self, *marks: str) -> Wait[str | None]:
        """Tell text up to a mark, and take that; None where the answer ends before."""
        while True:
            found = [(at, mark) for mark in marks if (at := self._left.find(mark)) >= 0]
            at, mark = min(found, default=(len(self._left), None))
            if not found and not self._ended:
                at -= max((_begun(self._left, mark) for mark in marks), default=0)
            if text := self._take(at):
                self._say("text", text)
            if mark:
                self._take(len(mark))
                return mark
            if self._ended:
                return None
            yield

    def _starts(self, *words: str) -> Wait[str | None]:
        """Take one of these words if it is what comes next; the longer ones come first."""
        while True:
            for word in words:
                if self._left.startswith(word):
                    return self._take(len(word))
                if word.startswith(self._left) and not self._ended:
                    break
            else:
                return None
            yield

    def _blank(self) -> Wait[str]:
        """Take white space, and return the character behind it."""
        while True:
            self._take(len(self._left) - len(self._left.lstrip()))
            if self._left or self._ended:
                return self._left[:1]
            yield

    def _matching(self, pattern: re.Pattern[str]) -> Wait[str]:
        """Take all that fits, once something else is behind it."""
        while True:
            found = pattern.match(self._left)
            end = found.end() if found else 0
            if end < len(self._left) or self._ended or end > _LONGEST_WORD:
                return self._take(min(end, _LONGEST_WORD))
            yield

    def _string(self) -> Wait[str | None]:
        while self._left[:1] in ('"', ""):
            if (found := _STRING.match(self._left)) and found.end() <= _LONGEST_WORD:
                text: str | None = _loaded(self._take(found.end()), str)
                return text
            if self._ended or len(self._left) > _LONGEST_WORD:
                return None
            yield
        return None

    def _nested(self, *, tell: bool) -> Wait[str | None]:
        """Take an object or a list, telling it as it comes; None if it is none."""
        opened: list[str] = []
        quoted = False
        whole = ""
        while True:
            end, ends = len(self._left), False
            for found in _NOTABLE.finditer(self._left):
                mark = found[0]
                if mark == "\\":
                    end = found.start()
                elif mark == '"':
                    quoted = not quoted
                elif quoted or mark[0] == "\\":
                    pass
                elif mark in "{[":
                    opened.append(mark)
                elif not opened or opened.pop() + mark not in ("{}", "[]"):
                    end, ends = found.start(), True
                    break
                elif not opened:
                    end, ends = found.end(), True
                    break
            text = self._take(end)
            whole += text
            if tell and text:
                self._say("arguments", text)
            if ends or self._ended:
                return whole if _loaded(whole, (dict, list)) is not None else None
            yield

    def _skipped(self) -> Wait[bool]:
        """Take a value that says nothing about the call, as an id."""
        if self._left[:1] == '"':
            return (yield from self._string()) is not None
        if self._left[:1] in ("{", "["):
            return (yield from self._nested(tell=False)) is not None
        return bool((yield from self._matching(_SCALAR)))

    # Calls

    def _call(self) -> Wait[bool]:
        """Read a call that is an object with a name and arguments; say whether it was one."""
        name = arguments = None
        told = False
        yield from self._blank()
        if not (yield from self._starts("{")):
            return False
        while True:
            yield from self._blank()
            key = yield from self._string()
            yield from self._blank()
            if key is None or not (yield from self._starts(":")):
                return False
            yield from self._blank()
            if key == "name" and name is None:
                name = yield from self._string()
                if name not in self._names:
                    return False
            elif key in ("arguments", "parameters") and arguments is None:
                if self._left[:1] != "{":
                    return False
                if told := name is not None:
                    self._say("name", name)
                arguments = yield from self._nested(tell=told)
                if arguments is None:
                    return self._broken(told)
            elif not (yield from self._skipped()):
                return self._broken(told)
            yield from self._blank()
            if (yield from self._starts("}")):
                break
            if not (yield from self._starts(",")):
                return self._broken(told)
        if name is None:
            return False
        if not told:
            self._say("name", name)
            self._say("arguments", "{}" if arguments is None else arguments)
        self._say("end")
        return True

    def _broken(self, told: bool) -> bool:
        """Leave a call that has been begun without its end."""
        if told:
            self._say("arguments")
        return False

    def _named(self, name: str) -> Wait[bool]:
        """Read the arguments of a call whose name stands before them."""
        if name not in self._names or (yield from self._blank()) != "{":
            return False
        self._say("name", name)
        if (yield from self._nested(tell=True)) is None:
            return self._broken(True)
        self._say("end")
        return True

    def _calls(self, *between: str) -> Wait[bool]:
        """Read a list of calls, or calls with something between them; say whether all were."""
        yield from self._blank()
        listed = yield from self._starts("[")
        while (yield from self._call()):
            yield from self._blank()
            if not (yield from self._starts(*((",",) if listed else between))):
                if listed:
                    yield from self._starts("]")
                self._source = ""
                return True
        self._give_up()
        return False


class Hermes(Reader):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Hermes and Qwen have it."""

    def answer(self) -> Wait[None]:
        while (yield from self._until("<tool_call>")):
            if (yield from self._call()):
                yield from self._blank()
                yield from self._starts("</tool_call>")
                self._source = ""
            else:
                self._give_up()


class Llama(Reader):
    """``{"name": …, "parameters": {…}}`` for an answer, or behind ``<|python_tag|>``."""

    def answer(self) -> Wait[None]:
        if (yield from self._blank()) not in ("{", "["):
            self._give_up()
            if not (yield from self._until("<|python_tag|>")):
                return
        yield from self._calls(";", ",")
        yield from self._until()


class Mistral(Reader):
    """``[TOOL_CALLS]`` and a list, or each call as ``[TOOL_CALLS]name[ARGS]{…}``."""

    def answer(self) -> Wait[None]:
        while (yield from self._until("[TOOL_CALLS]")):
            if (yield from self._blank()) in ("[", "{"):
                yield from self._calls()
                continue
            name = yield from self._matching(_WORD)
            if (yield from self._starts("[CALL_ID]")):
                yield from self._matching(_WORD)
            yield from self._starts("[ARGS]")
            if (yield from self._named(name)):
                self._source = ""
            else:
                self._give_up()


class DeepSeek(Reader):
    """Calls between marks of their own: V3's with a fence, V3.1's bare."""

    def answer(self) -> Wait[None]:
        first, begin, middle, end, last = (
            _DEEPSEEK.format(mark)
            for mark in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
        )
        while mark := (yield from self._until(first, begin)):
            if mark == first:
                yield from self._blank()
                if not (yield from self._starts(begin)):
                    self._give_up()
                    continue
            name = yield from self._matching(_WORD)
            if not (yield from self._starts(middle)):
                self._give_up()
                continue
            if (yield from self._blank()) != "{":
                # What stood there was the kind of tool.
                name = yield from self._matching(_WORD)
                yield from self._blank()
                yield from self._starts("```json")
            if not (yield from self._named(name)):
                self._give_up()
                continue
            for closing in ("```", end, last):
                yield from self._blank()
                yield from self._starts(closing)
            self._source = ""


class Json(Reader):
    """An answer that is a call as JSON, a list of them, or one of both in a fence."""

    def answer(self) -> Wait[None]:
        yield from self._blank()
        fenced = yield from self._starts("```json", "```")
        if (yield from self._calls(",", ";")) and fenced:
            yield from self._blank()
            yield from self._starts("```")
            self._source = ""
        yield from self._until()


class Arguments(Reader):
    """An answer that is nothing but the arguments of one call, for it is held to be that."""

    def answer(self) -> Wait[None]:
        (name,) = self._names
        if not (yield from self._named(name)):
            self._give_up()
        yield from self._until()


def _begun(text: str, mark: str) -> int:
    """How many characters at the end of the text may become the mark."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


def _loaded(text: str, kind: Any) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, kind) else None


def _marked(rank: int, *marks: str, without: str = "\0") -> Any:
    return lambda template: (
        rank if without not in template and any(mark in template for mark in marks) else 0
    )


PARSERS = [
    ToolParser(
        name="hermes",
        summary="Hermes, Qwen 2.5 and 3: JSON in <tool_call>",
        reader=Hermes,
        # Qwen3-Coder has the same mark around XML.
        suits=_marked(10, "<tool_call>", without="<function="),
    ),
    ToolParser(
        name="llama3",
        summary="Llama 3.1 to 3.3: JSON with parameters",
        reader=Llama,
        suits=_marked(10, "<|python_tag|>", '"parameters": '),
    ),
    ToolParser(
        name="mistral",
        summary="Mistral: [TOOL_CALLS]",
        reader=Mistral,
        suits=_marked(20, "[TOOL_CALLS]"),
    ),
    ToolParser(
        name="deepseek",
        summary="DeepSeek R1, V3 and V3.1: marks of its own",
        reader=DeepSeek,
        suits=_marked(20, _DEEPSEEK.format("call▁begin")),
    ),
    ToolParser(
        name="generic",
        summary="Any model that answers with a call as JSON",
        reader=Json,
        suits=_marked(1, ""),
    ),
]
"""The built-in parsers; ``generic`` is for templates that nothing else fits."""
