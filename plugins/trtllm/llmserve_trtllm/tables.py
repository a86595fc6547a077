"""The tensors of NVIDIA's templates by version, read from ``tensors.txt``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llmserve.plugin import Value
from llmserve_trtllm.versions import Version

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Range:
    """Some versions: from the first on, and before the second if there is one."""

    since: Version
    until: Version | None

    @classmethod
    def parse(cls, text: str) -> Range:
        """Read ``0.12:0.15`` or ``0.12:``."""
        since, _, until = text.partition(":")
        return cls(Version.parse(since), Version.parse(until) if until else None)

    def __contains__(self, version: Version) -> bool:
        return self.since <= version and (self.until is None or version < self.until)

    def __str__(self) -> str:
        if self.until is None:
            return f"from {self.since.short} on"
        return f"from {self.since.short} on and before {self.until.short}"


@dataclass(frozen=True)
class Row:
    """A tensor as a template declares it."""

    name: str
    kind: str
    dims: tuple[int, ...] = (1,)
    optional: bool = False
    reshape: bool = False
    ragged: bool = False


def rows(section: str, version: Version, options: Mapping[str, Value]) -> list[Row]:
    """Return a section's tensors in a version; some have the type that an option gives.

    >>> [row.name for row in rows("postprocessing inputs", Version(0, 12), {})]
    ['TOKENS_BATCH', 'SEQUENCE_LENGTH']
    """
    found = []
    for name, kind, dims, flags, versions in _sections()[section]:
        if version not in Range.parse(versions):
            continue
        if kind.islower():
            kind = str(options[kind]).removeprefix("TYPE_")
        sizes = tuple(int(size) for size in dims.split(","))
        found.append(Row(name, kind, sizes, "o" in flags, "s" in flags, "r" in flags))
    return found


@cache
def _sections() -> Mapping[str, list[list[str]]]:
    sections: dict[str, list[list[str]]] = {}
    for line in lines("tensors.txt"):
        if line.startswith("["):
            current = sections[line.strip("[]")] = []
        else:
            current.append(line.split())
    return sections


def lines(name: str) -> Iterable[str]:
    """Return the lines of a text file beside this one, without comments."""
    text = (_FOLDER / name).read_text(encoding="utf-8")
    return (line for line in text.splitlines() if line and not line.startswith("#"))
