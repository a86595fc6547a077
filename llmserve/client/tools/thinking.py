"""Readers that tell a model's thinking from its answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmserve.client.tools.parts import ToolPart, ToolReader
from llmserve.client.tools.reading import WORD, Parsing, Reader, partial_length

_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = (_END, _CALL, _RETURN, _START, _CHANNEL)
_HEADER = 512
"""A longer header is none."""


@dataclass(frozen=True)
class ThinkingForm:
    """The marks around a model's thinking, and around the answer that follows if it has any."""

    begin: str
    end: str
    answer: tuple[str, str] | None = None
    speaker: str = ""
    """What some write at the beginning of an answer, to say whose it is."""


class ReasoningReader(Reader):
    """What readers of thinking share."""

    def _emit_reasoning_until(self, *marks: str) -> Parsing[str | None]:
        """Emit thinking up to a mark, without the white space around it; take the mark."""
        yield from self._skip_space()
        self._source = ""
        while True:
            matches = [(at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
            end, mark = min(matches, default=(len(self._buffer), None))
            if not matches:
                # At the end of the answer, a mark that has only begun is no thought either.
                end -= max(partial_length(self._buffer, mark) for mark in marks)
            text = self._buffer[:end]
            if certain := text.rstrip():
                self._emit("reasoning", self._take(len(certain)))
            if mark:
                self._take(len(text) - len(certain) + len(mark))
                self._source = ""
                return mark
            if self._ended:
                self._take(len(self._buffer))
                self._source = ""
                return None
            yield

    def _drop_space(self) -> Parsing[None]:
        yield from self._skip_space()
        self._source = ""


class MarkedThinking(ReasoningReader):
    """Thinking at the beginning of an answer, between two marks; all else is text."""

    def __init__(self, form: ThinkingForm, names: frozenset[str]) -> None:
        super().__init__(names)
        self._form = form

    def parse(self) -> Parsing[None]:
        form = self._form
        yield from self._skip_space()
        if (yield from self._take_prefix(form.begin)):
            yield from self._skip_space()
            # Some write the mark even if the prompt has it already.
            yield from self._take_prefix(form.begin)
            yield from self._emit_reasoning_until(form.end)
        elif not (yield from self._take_prefix(form.end)):
            self._emit_source_as_text()
            yield from self._emit_until()
            return
        yield from self._drop_space()
        if form.answer:
            yield from self._drop(form.answer[0], form.speaker)
            yield from self._drop_space()
            yield from self._emit_until(form.answer[1])
            yield from self._drop_space()
        yield from self._emit_until()


class Harmony(ReasoningReader):
    """gpt-oss: messages with headers, in channels for analysis, calls and the answer."""

    def parse(self) -> Parsing[None]:
        thought = False
        while True:
            yield from self._skip_space()
            if self._ended and not self._buffer:
                return
            if not (yield from self._take_prefix(_START, _CHANNEL, "to=")):
                # No header: the answer of a model that does not write it.
                self._emit_source_as_text()
                if (yield from self._emit_until(_START, _CHANNEL)) is None:
                    return
            if (yield from self._take_until(_MESSAGE, _HEADER)) is None:
                if self._ended:
                    self._take(len(self._buffer))
                else:
                    self._emit_source_as_text()
                self._source = ""
                continue
            header, self._source = self._source, ""
            recipient = _after(header, "to=")
            if recipient and (yield from self._read_harmony_call(recipient)):
                continue
            if _after(header, _CHANNEL) != "analysis":
                mark = yield from self._emit_until(*_ENDS)
            else:
                if thought:
                    self._emit("reasoning", "\n")
                thought = True
                mark = yield from self._emit_reasoning_until(*_ENDS)
            if mark in (_START, _CHANNEL):
                self._buffer = mark + self._buffer
            self._source = ""

    def _read_harmony_call(self, recipient: str) -> Parsing[bool]:
        name = recipient.removeprefix("functions.")
        if not (yield from self._read_arguments(name)):
            return False
        yield from self._drop_space()
        yield from self._take_prefix(_CALL, _END, _RETURN)
        self._source = ""
        return True


class Command(ReasoningReader):
    """Cohere's Command R7B and A: thinking, calls and the answer, each between marks of its own."""

    def parse(self) -> Parsing[None]:
        think, act, respond = "<|START_THINKING|>", "<|START_ACTION|>", "<|START_RESPONSE|>"
        over = "<|END_RESPONSE|>"
        while mark := (yield from self._emit_until(think, act, respond, over)):
            if mark == act:
                if (yield from self._read_calls()):
                    yield from self._drop("<|END_ACTION|>")
                continue
            self._source = ""
            if mark == think:
                yield from self._skip_space()
                yield from self._take_prefix(think)
                yield from self._emit_reasoning_until("<|END_THINKING|>")
            yield from self._drop_space()


class Chain:
    """Reads an answer with one reader, and the text that it finds with another."""

    def __init__(self, first: ToolReader, second: ToolReader | None) -> None:
        self._first, self._second = first, second

    def read(self, text: str) -> Iterable[ToolPart]:
        return self._through(self._first.read(text))

    def end(self) -> Iterable[ToolPart]:
        parts = self._through(self._first.end())
        return parts if self._second is None else [*parts, *self._second.end()]

    def _through(self, parts: Iterable[ToolPart]) -> list[ToolPart]:
        found: list[ToolPart] = []
        for part in parts:
            if part.kind == "text" and self._second is not None:
                found += self._second.read(part.text)
            else:
                found.append(part)
        return found


def _after(header: str, mark: str) -> str:
    """Return the word after a mark, which may be cut off by another mark."""
    _, found, rest = header.partition(mark)
    match = WORD.match(rest)
    return match[0] if found and match else ""
