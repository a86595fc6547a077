"""Texts from elsewhere, made safe to print."""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, and halves of characters, which no stream takes."""


def printable(text: str) -> str:
    r"""Escape control characters, so that a text from elsewhere cannot control the terminal.

    >>> printable("\x1b[31mred")
    '\\x1b[31mred'
    """
    return _UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text)


def in_gb(size: float) -> str:
    """Return a size of memory in words.

    >>> in_gb(15_230_000_000), in_gb(88_000_000)
    ('15.2 GB', '88 MB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
