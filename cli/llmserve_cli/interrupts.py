"""Handling of Ctrl-C: exit at once before work has started, and clean up afterwards.

A KeyboardInterrupt inside an import is not safe: numpy turns it into an ImportError, and other
packages continue with a slower fallback. So nothing is raised while modules are imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

EXIT_CODE = 130
_interrupted = False


def exit_at_once() -> None:
    """From now on, Ctrl-C exits the process at once: there is nothing to clean up."""
    # A background job of a shell ignores Ctrl-C, and must continue to.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt(*others: signal.Signals) -> None:
    """From now on, Ctrl-C and the other signals raise KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, _raise)
    for number in others:
        signal.signal(number, _raise)


@contextmanager
def while_importing() -> Iterator[None]:
    """Let Ctrl-C exit the process at once in this block, which only imports modules."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is _raise:
        signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        if handler is _raise:
            signal.signal(signal.SIGINT, _raise)


@contextmanager
def stoppable() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in this block, where it does not end the program."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def ignore() -> None:
    """From now on, ignore Ctrl-C: the work is done, and only Python must exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If a KeyboardInterrupt has left the last text that Python compiled and ran (dataclasses and
    # named tuples are made from such texts), `python -m` ends itself by SIGINT instead of with its
    # exit code, although the exception was caught.
    exec("")  # noqa: S102


def interrupted() -> bool:
    """Whether a KeyboardInterrupt was raised, even if other code has caught it."""
    return _interrupted


def _exit(number: int, frame: Any) -> NoReturn:
    del number, frame
    line = b"llmserve: interrupted\n"
    os.write(2, b"\n" + line if os.isatty(2) else line)
    os._exit(EXIT_CODE)


def _raise(number: int, frame: Any) -> NoReturn:
    global _interrupted
    del number, frame
    _interrupted = True
    # Python would print a KeyboardInterrupt raised in a destructor, which cannot be caught.
    sys.unraisablehook = lambda _: None
    raise KeyboardInterrupt
