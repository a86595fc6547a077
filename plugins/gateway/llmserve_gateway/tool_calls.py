"""Calls of tools in the answers of models: read out of their text, and handed on as they come."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, replace

from llmserve.client import Completion, Piece
from llmserve.plugin import ToolPart, ToolReader

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Call:
    """A call of a tool, or the next part of one: its ``id`` and ``name`` come once."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


def new_id() -> str:
    # Mistral's templates take these nine characters and nothing else.
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class Answer:
    """One answer as it comes; without ``parallel`` it has one call, and others are left out."""

    def __init__(self, reader: ToolReader, parallel: bool) -> None:
        self._reader = reader
        self._most = None if parallel else 1
        self._held = ""
        self._begun = self._complete = 0
        self.ended = False

    def take(self, piece: Piece) -> tuple[Piece, list[Call]]:
        """Return what is text of a piece, and what belongs to calls."""
        parts = list(self._reader.read(piece.text))
        if piece.finish_reason:
            self.ended = True
            parts += self._reader.end()
        calls: dict[int, Call] = {}
        text = self._held
        for part in parts:
            text += part.text if part.kind == "text" else ""
            self._note(part, calls)
        # Blank lines before a call are no content, and only what comes tells whether they are.
        told = text if self.ended and not self._begun else text.rstrip()
        self._held = text[len(told) :]
        reason = _reason(piece.finish_reason, self._complete)
        return replace(piece, text=told, finish_reason=reason), list(calls.values())

    def _note(self, part: ToolPart, calls: dict[int, Call]) -> None:
        self._begun += part.kind == "name"
        self._complete += part.kind == "end"
        at = self._begun - 1
        if part.kind not in ("name", "arguments") or not part.text:
            return
        if self._most is not None and at >= self._most:
            return
        call = calls.get(at, Call(at))
        if part.kind == "name":
            calls[at] = replace(call, name=part.text, id=new_id())
        else:
            calls[at] = replace(call, arguments=call.arguments + part.text)


def read_whole(
    reader: Callable[[], ToolReader] | None, answer: Completion, parallel: bool
) -> tuple[Completion, list[Call]]:
    """Return what is text of a whole answer, and its calls; one that does not end is text."""
    if reader is None:
        return answer, []
    read = reader()
    texts: list[str] = []
    calls: list[Call] = []
    begun: list[ToolPart] = []

    def no_call() -> None:
        texts.extend(part.source for part in begun)
        begun.clear()

    for part in (*read.read(answer.text), *read.end()):
        if part.kind == "text":
            no_call()
            texts.append(part.text)
            continue
        if part.kind == "name":
            no_call()
        begun.append(part)
        if part.kind == "end":
            arguments = "".join(one.text for one in begun if one.kind == "arguments")
            calls.append(Call(len(calls), arguments, new_id(), begun[0].text))
            begun.clear()
    no_call()
    text = "".join(texts)
    text = text.rstrip() if calls else text
    reason = _reason(answer.finish_reason, len(calls))
    return replace(answer, text=text, finish_reason=reason), calls if parallel else calls[:1]


def _reason(reason: str | None, calls: int) -> str | None:
    return "tool_calls" if calls and reason == "stop" else reason
