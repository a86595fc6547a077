"""What commands print besides answers: tables that wrap, and JSON."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import click

_MIN_LAST_COLUMN = 24
"""Below this width, the last column of a table is not readable."""


def print_json(content: Any, *, indent: int | None = 2) -> None:
    click.echo(json.dumps(content, indent=indent, ensure_ascii=False))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print a table with a heading; wrap it between words if the terminal is too narrow.

    This does not use rich, whose import takes longer than all the rest.
    """
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in fold_table(rows, columns):
        click.echo(line)


def fold_table(rows: Sequence[Sequence[str]], columns: int) -> list[str]:
    """Format a table for this many columns; 0 means no limit.

    The last column wraps first. If that is not enough, each row becomes several lines: its first
    cell, and below it the other cells with the names of their columns.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last_width = columns - sum(widths[:-1]) - 2 * len(widths[:-1])
    lines = []
    if not columns or last_width >= min(widths[-1], _MIN_LAST_COLUMN):
        for row in rows:
            head = "".join(f"{c:<{w}}  " for c, w in zip(row[:-1], widths[:-1], strict=True))
            lines += _wrapped(row[-1], head, columns)
        return lines
    title, *body = rows
    for row in body:
        lines.append(row[0])
        for name, cell in zip(title[1:], row[1:], strict=True):
            lines += _wrapped(cell, f"  {name.lower()}: ", columns)
    return lines


def _wrapped(text: str, head: str, columns: int) -> list[str]:
    """Wrap a text after a head, with all lines aligned."""
    if not columns:
        return [(head + text).rstrip()]
    width = columns - len(head)
    # A path or link is not split, so that users can copy it.
    parts = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    blank = " " * len(head)
    return [((blank if i else head) + part).rstrip() for i, part in enumerate(parts)]
