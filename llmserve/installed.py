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


def entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points of a group; the first distribution of a name on the path counts.

    >>> [point.value for point in entry_points("no such group")]
    []
    """
    found: dict[str, list[EntryPoint]] = {}
    for folder in sys.path:
        for path in _distributions(folder or "."):
            points = _announced(path, group)
            if points:
                found.setdefault(points[0].distribution.lower(), points)
    return sorted((p for points in found.values() for p in points), key=lambda p: p.name)


def _distributions(folder: str) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            yield from sorted(e.path for e in entries if e.name.endswith(tuple(_METADATA)))
    except OSError:
        # Zipped and vanished folders stand on the path as well; plugins live in neither.
        return


def _announced(path: str, group: str) -> list[EntryPoint]:
    values: dict[str, str] = {}
    section = ""
    for line in _lines(path, "entry_points.txt"):
        if line.startswith("["):
            section = line.strip("[] ")
        elif section == group and "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            values[name.strip()] = value.partition("[")[0].strip()
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
    return [EntryPoint(entry, value, name, version) for entry, value in values.items()]


def _lines(folder: str, file: str) -> Iterator[str]:
    try:
        # A stranger's damaged file must not hide everybody's plugins.
        with open(f"{folder}/{file}", encoding="utf-8", errors="replace") as stream:  # noqa: PTH123
            for line in stream:
                yield line.strip()
    except OSError:
        return
