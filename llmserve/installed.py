"""Which installed distributions announce plugins, read straight from their metadata files.

``importlib.metadata`` finds the same, but importing it takes longer than all the rest of
``llmserve --help``: it brings along the email, zip and socket modules. This reads the two files
that are needed, as the packaging specifications lay them out, and nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_METADATA = {".dist-info": "METADATA", ".egg-info": "PKG-INFO"}


@dataclass(frozen=True)
class EntryPoint:
    """A plugin's module, and the distribution that announces it."""

    name: str
    value: str
    distribution: str
    version: str
    group: str = ""
    folder: str = ""
    """Where the distribution's metadata lies."""


def normal(distribution: str) -> str:
    """Return the one spelling of a distribution's name by which names are compared.

    >>> normal("Acme_Words.Plus")
    'acme-words-plus'
    """
    return distribution.lower().replace("_", "-").replace(".", "-")


def entry_points(group: str, *, below: bool = False) -> list[EntryPoint]:
    """Return the entry points of a group; the first distribution of a name on the path counts.

    With ``below`` those of the groups below it are among them: of ``llmserve.api1`` when
    ``llmserve`` is asked for.

    >>> [point.value for point in entry_points("no such group")]
    []
    """
    found: dict[str, list[EntryPoint]] = {}
    for folder in sys.path:
        for path in _distributions(folder or "."):
            points = _announced(path, group, below)
            if points:
                found.setdefault(normal(points[0].distribution), points)
    return sorted((p for points in found.values() for p in points), key=lambda p: p.name)


def _distributions(folder: str) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            yield from sorted(e.path for e in entries if e.name.endswith(tuple(_METADATA)))
    except OSError:
        # Zipped and vanished folders stand on the path as well; plugins live in neither.
        return


def _announced(path: str, group: str, below: bool) -> list[EntryPoint]:
    values: dict[tuple[str, str], str] = {}
    section, wanted = "", False
    for line in _lines(path, "entry_points.txt"):
        if line.startswith("["):
            section = line.strip("[] ")
            wanted = section == group or (below and section.startswith(f"{group}."))
        elif wanted and "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            values[section, name.strip()] = value.partition("[")[0].strip()
    if not values:
        return []
    name = version = "unknown"
    for line in _lines(path, _METADATA[os.path.splitext(path)[1]]):  # noqa: PTH122
        key, _, value = line.partition(":")
        if key == "Name":
            name = value.strip()
        elif key == "Version":
            version = value.strip()
        elif not line:
            # The description follows an empty line.
            break
    return [
        EntryPoint(entry, value, name, version, section, path)
        for (section, entry), value in values.items()
    ]


def _lines(folder: str, file: str) -> Iterator[str]:
    try:
        # A stranger's damaged file must not hide everybody's plugins.
        with open(f"{folder}/{file}", encoding="utf-8", errors="replace") as stream:  # noqa: PTH123
            for line in stream:
                yield line.strip()
    except OSError:
        return
