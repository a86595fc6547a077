"""Assembles text and tool calls from what a reader finds in an answer, whole or streamed."""

from __future__ import annotations

import secrets
import string
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from itertools import chain
from typing import Any

from llmserve.client.results import Completion, Piece, ToolCall
from llmserve.client.tools.parts import NewReader, ToolPart, ToolReader

_SLICE = 4096
"""Readers look at all that they are given for each mark: a long answer is read in slices."""
_LETTERS = string.ascii_letters + string.digits


def read_calls(reader: ToolReader, answer: Completion, *, parallel: bool = True) -> Completion:
    """Split a whole answer into reasoning, text and calls; an unfinished call stays text."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    call_parts: list[ToolPart] = []

    def keep_as_text() -> None:
        texts.extend(part.source for part in call_parts)
        call_parts.clear()

    slices = (answer.text[at : at + _SLICE] for at in range(0, len(answer.text), _SLICE))
    parts = chain.from_iterable(map(reader.read, slices))
    for part in chain(parts, _at_end(reader)):
        if part.kind in ("text", "reasoning"):
            keep_as_text()
            (texts if part.kind == "text" else thoughts).append(part.text)
            continue
        if part.kind == "name":
            keep_as_text()
        call_parts.append(part)
        if part.kind == "end":
            arguments = "".join(p.text for p in call_parts if p.kind == "arguments")
            calls.append(ToolCall(len(calls), arguments, _new_id(), call_parts[0].text))
            call_parts.clear()
    keep_as_text()
    text = "".join(texts)
    return replace(
        answer,
        text=text.rstrip() if calls else text,
        finish_reason=_reason_with(calls, answer.finish_reason),
        tool_calls=tuple(calls if parallel else calls[:1]),
        reasoning="".join(thoughts),
    )


def _at_end(reader: ToolReader) -> Iterator[ToolPart]:
    """Yield what ends an answer, asked for when all before it is read."""
    yield from reader.end()


async def stream_calls(
    pieces: AsyncGenerator[Piece, None], new_reader: NewReader, count: int, *, parallel: bool = True
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of ``count`` answers with their text separated from their tool calls."""
    answers = [CallStream(new_reader(), parallel) for _ in range(count)]
    async with aclosing(pieces):
        async for piece in pieces:
            yield answers[piece.index].convert(piece)
    for index, answer in enumerate(answers):
        if not answer.ended:
            yield answer.convert(Piece("", index, finish_reason="stop"))


class CallStream:
    """Converts the pieces of one answer; without ``parallel``, only its first call is kept.

    Tokens count as reasoning if they have become text of it, or its first mark. A piece with the
    last of them and the first of the answer counts as a whole.
    """

    def __init__(self, reader: ToolReader, parallel: bool) -> None:
        self._reader = reader
        self._max_calls = None if parallel else 1
        self._held_text = ""
        self._started = self._completed = 0
        self._tokens = self._pending = self._thought = 0
        self.ended = False

    def convert(self, piece: Piece) -> Piece:
        """Return a piece with its text separated from its reasoning and its tool calls."""
        parts = list(self._reader.read(piece.text))
        if piece.finish_reason:
            self.ended = True
            parts += self._reader.end()
        calls: dict[int, ToolCall] = {}
        text, reasoning = self._held_text, ""
        for part in parts:
            text += part.text if part.kind == "text" else ""
            reasoning += part.text if part.kind == "reasoning" else ""
            self._add(part, calls)
        self._count(piece.output_tokens, bool(parts), bool(reasoning))
        # Blank lines before a call are not content; whether a call follows, only later pieces show.
        content = text if self.ended and not self._started else text.rstrip()
        self._held_text = text[len(content) :]
        reason = _reason_with(self._completed, piece.finish_reason)
        return replace(
            piece,
            text=content,
            finish_reason=reason,
            tool_calls=tuple(calls.values()),
            reasoning=reasoning,
            reasoning_tokens=self._thought or None,
        )

    def _count(self, output_tokens: int | None, certain: bool, reasoning: bool) -> None:
        tokens = output_tokens or self._tokens
        self._pending += tokens - self._tokens
        self._tokens = tokens
        if certain:
            self._thought += self._pending if reasoning else 0
            self._pending = 0

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
            calls[index] = replace(call, name=part.text, id=_new_id())
        else:
            calls[index] = replace(call, arguments=call.arguments + part.text)


def _new_id() -> str:
    # Mistral's templates accept only ids of nine such characters.
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def _reason_with(calls: Any, reason: str | None) -> str | None:
    """Return the finish reason of an answer with these calls."""
    return "tool_calls" if calls and reason == "stop" else reason
