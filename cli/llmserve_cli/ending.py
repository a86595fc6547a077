"""Signals that end a command in order, so that what it made for the way is cleaned up."""

from __future__ import annotations

import signal


def end_in_order(*numbers: signal.Signals) -> None:
    """Let these signals raise KeyboardInterrupt, as Ctrl-C does in the foreground."""
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
