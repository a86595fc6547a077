"""Answers on a terminal, and what is typed meanwhile."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from llmserve.commands import printable

_MARK_PASTED, _MARK_NOTHING = "\x1b[?2004h", "\x1b[?2004l"
"""Ask the terminal to mark what is pasted, so that its lines stay together, and no longer to."""


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
