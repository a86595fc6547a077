"""Reads the tables beside this module: of tensors, of options, of containers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def sections(table: str) -> Mapping[str, tuple[str, ...]]:
    """Return a table's lines by the heading that they stand under."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in Path(__file__).with_name(table).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            heading = line.strip("[]")
        elif line and not line.startswith("#"):
            found.setdefault(heading, []).append(line)
    return {name: tuple(rows) for name, rows in found.items()}


def pairs(table: str, heading: str) -> dict[str, str]:
    return dict(line.split() for line in sections(table)[heading])
