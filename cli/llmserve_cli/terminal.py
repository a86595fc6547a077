"""Output for terminals: tables that wrap, and text without control characters."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

from llmserve.texts import printable

_MARK_PASTED, _MARK_NOTHING = "\x1b[?2004h", "\x1b[?2004l"
"""Ask the terminal to mark what is pasted, so that its lines stay together, and no longer to."""
_MIN_LAST_COLUMN = 24
"""Below this width, the last column of a table is not readable."""


@contextmanager
def typing_kept() -> Iterator[None]:
    """Leave what is typed to whoever reads next: nothing of it, nor a Ctrl-C, is shown meanwhile.

    An Enter stays the key that it is, and does not become the end of a line.
    """
    import termios

    try:
        before = termios.tcgetattr(0)
    except (OSError, termios.error):
        yield
        return
    modes = [*before]
    modes[0] &= ~termios.ICRNL
    modes[3] &= ~(termios.ECHO | termios.ECHOCTL | termios.ICANON)
    # A Ctrl-C that stops an answer does not discard the message that was typed before it.
    modes[3] |= termios.NOFLSH
    try:
        _set_modes(modes)
        if sys.stdout.isatty():
            _write(_MARK_PASTED)
        yield
    finally:
        if sys.stdout.isatty():
            _write(_MARK_NOTHING)
        _set_modes(before)


def _write(sequence: str) -> None:
    with suppress(OSError):
        sys.stdout.write(sequence)
        sys.stdout.flush()


def _set_modes(modes: list[Any]) -> None:
    """Set the modes of the terminal, unless it is gone, or another job has it.

    A job in the background would be stopped by that, even while it ends.
    """
    import termios

    with suppress(OSError, termios.error):
        if os.tcgetpgrp(0) == os.getpgrp():
            termios.tcsetattr(0, termios.TCSANOW, modes)


def echo_answer(text: str, *, nl: bool = True) -> None:
    """Print the answer of a model; a pipe gets it unchanged."""
    is_terminal = sys.stdout.isatty()
    # Without color=True, click would strip escape sequences for a pipe.
    click.echo(printable(text) if is_terminal else text, nl=nl, color=not is_terminal)


def size_in_words(size: int) -> str:
    """Return a size in words.

    >>> size_in_words(1_500), size_in_words(88_000_000), size_in_words(16_200_000_000)
    ('1.5 kB', '88 MB', '16.2 GB')
    """
    number, units = float(size), ["bytes", "kB", "MB", "GB"]
    while number >= 1000 and len(units) > 1:
        number, units = number / 1000, units[1:]
    return f"{number:.3g} {units[0]}"


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
