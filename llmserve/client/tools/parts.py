"""The output of tool call parsers, which the client and frontends assemble to calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Kind = Literal["text", "reasoning", "name", "arguments", "end"]


@dataclass(frozen=True)
class ToolPart:
    """The next part of an answer.

    It is text, ``reasoning`` that precedes the answer proper, the ``name`` of a tool at the start
    of a call, more of its ``arguments`` (JSON), or the ``end`` of a complete call. ``source`` is
    what the model generated for this part of a call; if the call never ends, it is text after all.
    """

    kind: Kind
    text: str = ""
    source: str = ""


class ToolReader(Protocol):
    """Parses one answer incrementally; how it is split into pieces makes no difference."""

    def read(self, text: str) -> Iterable[ToolPart]:
        """Read more of the answer, and return the parts that are certain by now."""

    def end(self) -> Iterable[ToolPart]:
        """Return the remaining parts at the end of the answer."""


class ToolNames(frozenset[str]):
    """The names of the tools that may be called, and the schemas of their arguments.

    Some families write arguments as plain text, and only the schema tells a number from a string.
    """

    schemas: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, functions: Iterable[Mapping[str, Any]]) -> ToolNames:
        schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        names = cls(schemas)
        names.schemas = schemas
        return names


NewReader = Callable[[], ToolReader]
"""Makes a reader for each answer."""
