"""What suits a terminal: tables that fold, and text that cannot steer it."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import click

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NARROWEST = 24
"""A last column narrower than this is not read as one."""


def printable(text: str) -> str:
    r"""Show control characters by their names, so that no answer can steer a terminal.

    >>> printable("\x1b[31mred")
    '\\x1b[31mred'
    """
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def echo_answer(text: str, *, nl: bool = True) -> None:
    """Print what a model has said; a pipe gets it as it is."""
    is_terminal = sys.stdout.isatty()
    # Without color=True click would take escapes out for a pipe.
    click.echo(printable(text) if is_terminal else text, nl=nl, color=not is_terminal)


def print_json(content: Any, *, indent: int | None = 2) -> None:
    click.echo(json.dumps(content, indent=indent, ensure_ascii=False))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print a table with a heading; on a terminal that is too narrow, between words.

    Not by rich, which would take longer to import than all the rest.
    """
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in fold_table(rows, columns):
        click.echo(line)


def fold_table(rows: Sequence[Sequence[str]], columns: int) -> list[str]:
    """Lay a table out in so many columns; 0 is for no limit.

    The last column folds first. Where that does not do, a row is a few lines: its first cell, and
    below it each of the others behind the name of its column.
    """
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    left = columns - sum(widths[:-1]) - 2 * len(widths[:-1])
    lines = []
    if not columns or left >= min(widths[-1], _NARROWEST):
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
    """Write a text behind a head, in lines that begin below each other."""
    if not columns:
        return [(head + text).rstrip()]
    room = columns - len(head)
    # A path or a link stays whole, for whoever copies it.
    parts = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    blank = " " * len(head)
    return [((blank if at else head) + part).rstrip() for at, part in enumerate(parts)]
