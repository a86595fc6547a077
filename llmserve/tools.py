"""What a reader of tool calls says of an answer, for whoever tells clients of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class ToolPart:
    """The next part of an answer.

    It is text, the ``name`` of a tool that a call begins with, more of its ``arguments`` (JSON),
    or the ``end`` of a call that is complete. ``source`` is what the model wrote for the part of
    a call: where a call does not end, that was text after all.
    """

    kind: Literal["text", "name", "arguments", "end"]
    text: str = ""
    source: str = ""


class ToolReader(Protocol):
    """Reads one answer as it comes; how it is cut into pieces makes no difference."""

    def read(self, text: str) -> Iterable[ToolPart]:
        """Take more of the answer, and return what is certain by now."""

    def end(self) -> Iterable[ToolPart]:
        """Return the rest; nothing more will come."""
