"""Conversion of streamed answers to text and tool calls."""

from __future__ import annotations

from dataclasses import replace

from llmserve.client import Piece, ToolCall
from llmserve.client.tools import new_id, reason_with
from llmserve.plugin import ToolPart, ToolReader


class CallStream:
    """Converts the pieces of one answer; without ``parallel``, only its first call is kept."""

    def __init__(self, reader: ToolReader, parallel: bool) -> None:
        self._reader = reader
        self._max_calls = None if parallel else 1
        self._held_text = ""
        self._started = self._completed = 0
        self.ended = False

    def convert(self, piece: Piece) -> Piece:
        """Return a piece with its text separated from its tool calls."""
        parts = list(self._reader.read(piece.text))
        if piece.finish_reason:
            self.ended = True
            parts += self._reader.end()
        calls: dict[int, ToolCall] = {}
        text = self._held_text
        for part in parts:
            text += part.text if part.kind == "text" else ""
            self._add(part, calls)
        # Blank lines before a call are not content; whether a call follows, only later pieces show.
        content = text if self.ended and not self._started else text.rstrip()
        self._held_text = text[len(content) :]
        reason = reason_with(self._completed, piece.finish_reason)
        return replace(piece, text=content, finish_reason=reason, tool_calls=tuple(calls.values()))

    def _add(self, part: ToolPart, calls: dict[int, ToolCall]) -> None:
        self._started += part.kind == "name"
        self._completed += part.kind == "end"
        index = self._started - 1
        if part.kind not in ("name", "arguments") or not part.text:
            return
        if self._max_calls is not None and index >= self._max_calls:
            return
        call = calls.get(index, ToolCall(index))
        if part.kind == "name":
            calls[index] = replace(call, name=part.text, id=new_id())
        else:
            calls[index] = replace(call, arguments=call.arguments + part.text)
