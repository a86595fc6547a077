"""The output of tool call parsers, which the client and frontends assemble to calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class ToolPart:
    """The next part of an answer.

    It is text, the ``name`` of a tool at the start of a call, more of its ``arguments`` (JSON), or
    the ``end`` of a complete call. ``source`` is what the model generated for this part of a call;
    if the call never ends, it is text after all.
    """

    kind: Literal["text", "name", "arguments", "end"]
    text: str = ""
    source: str = ""


class ToolReader(Protocol):
    """Parses one answer incrementally; how it is split into pieces makes no difference."""

    def read(self, text: str) -> Iterable[ToolPart]:
        """Read more of the answer, and return the parts that are certain by now."""

    def end(self) -> Iterable[ToolPart]:
        """Return the remaining parts at the end of the answer."""


NewReader = Callable[[], ToolReader]
"""Makes a reader for each answer."""
