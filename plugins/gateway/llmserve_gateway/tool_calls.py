"""Calls of tools in the answers of models, handed on as they come."""

from __future__ import annotations

from dataclasses import replace

from llmserve.client import Piece, ToolCall
from llmserve.client.tools import new_id, reason_with
from llmserve.plugin import ToolPart, ToolReader


class Answer:
    """One answer as it comes; without ``parallel`` it has one call, and others are left out."""

    def __init__(self, reader: ToolReader, parallel: bool) -> None:
        self._reader = reader
        self._most = None if parallel else 1
        self._held = ""
        self._begun = self._complete = 0
        self.ended = False

    def take(self, piece: Piece) -> Piece:
        """Return a piece with what is text of it, and what belongs to calls."""
        parts = list(self._reader.read(piece.text))
        if piece.finish_reason:
            self.ended = True
            parts += self._reader.end()
        calls: dict[int, ToolCall] = {}
        text = self._held
        for part in parts:
            text += part.text if part.kind == "text" else ""
            self._note(part, calls)
        # Blank lines before a call are no content, and only what comes tells whether they are.
        told = text if self.ended and not self._begun else text.rstrip()
        self._held = text[len(told) :]
        reason = reason_with(self._complete, piece.finish_reason)
        return replace(piece, text=told, finish_reason=reason, tool_calls=tuple(calls.values()))

    def _note(self, part: ToolPart, calls: dict[int, ToolCall]) -> None:
        self._begun += part.kind == "name"
        self._complete += part.kind == "end"
        at = self._begun - 1
        if part.kind not in ("name", "arguments") or not part.text:
            return
        if self._most is not None and at >= self._most:
            return
        call = calls.get(at, ToolCall(at))
        if part.kind == "name":
            calls[at] = replace(call, name=part.text, id=new_id())
        else:
            calls[at] = replace(call, arguments=call.arguments + part.text)
