"""YAML as a tree whose values know their lines; aliases are not copied, tags make no objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from llmserve.errors import ConfigError
from llmserve_cli.adopting.source_text import SourceText

_MOST_MERGES = 8


@dataclass(frozen=True)
class Node:
    """A value of a YAML file. What is asked of one of another kind is empty, and not an error."""

    raw: Any
    source: SourceText

    @property
    def line(self) -> int:
        return int(self.raw.start_mark.line) + 1

    @property
    def last_line(self) -> int:
        return int(self.raw.end_mark.line) + 1

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.raw, yaml.MappingNode)

    @property
    def is_list(self) -> bool:
        return isinstance(self.raw, yaml.SequenceNode)

    @property
    def text(self) -> str | None:
        """The value of a scalar as it stands there; None if it is none, or null."""
        if not isinstance(self.raw, yaml.ScalarNode) or self.raw.tag == "tag:yaml.org,2002:null":
            return None
        return str(self.raw.value)

    def items(self) -> Iterator[tuple[str, Node]]:
        """Yield the entries of a mapping, those that are merged into it last."""
        yield from self._items(_MOST_MERGES)

    def _items(self, merges: int) -> Iterator[tuple[str, Node]]:
        if not self.is_mapping:
            return
        merged: list[Any] = []
        for key, value in self.raw.value:
            if key.tag == "tag:yaml.org,2002:merge":
                merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
            elif isinstance(key, yaml.ScalarNode):
                yield str(key.value), Node(value, self.source)
        for value in merged if merges else ():
            yield from Node(value, self.source)._items(merges - 1)

    def entries(self) -> list[Node]:
        """Return the entries of a list."""
        return [Node(each, self.source) for each in self.raw.value] if self.is_list else []

    def get(self, *path: str) -> Node | None:
        """Return what is at a path of keys, if there is anything."""
        found: Node | None = self
        for key in path:
            if found is None:
                return None
            found = next((value for name, value in found.items() if name == key), None)
        return found

    def text_at(self, *path: str) -> str | None:
        node = self.get(*path)
        return node.text if node else None

    def list_at(self, *path: str) -> list[Node]:
        node = self.get(*path)
        return node.entries() if node else []

    def plain(self, depth: int = 12) -> Any:
        """Return it as Python's own values; what is deeper than that is left out."""
        if self.is_mapping:
            return {name: each.plain(depth - 1) for name, each in self.items()} if depth else {}
        if self.is_list:
            return [each.plain(depth - 1) for each in self.entries()] if depth else []
        if self.text is None:
            return None
        try:
            value = yaml.safe_load(self.text) if not self.raw.style else self.text
        except (yaml.YAMLError, ValueError):
            return self.text
        return value if isinstance(value, (bool, int, float)) else self.text


def read_yaml(source: SourceText) -> list[Node]:
    """Return the documents of a file that have anything in them."""
    try:
        found = list(yaml.compose_all(source.text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        words = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{source.name} is not YAML: {where}{words}") from None
    except RecursionError:
        raise ConfigError(f"{source.name} is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{source.name} is not YAML: {error}") from None
    return [Node(each, source) for each in found if each is not None]
