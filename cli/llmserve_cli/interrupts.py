"""What Ctrl-C does: end at once while nothing has begun, and clean up afterwards.

A KeyboardInterrupt inside an import is not safe: numpy makes an ImportError of it, other packages
fall back to something slower and go on. So nothing is raised while modules are imported.
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


def end_at_once() -> None:
    """From now on Ctrl-C ends the process where it stands: there is nothing to clean up."""
    # A shell's background job ignores Ctrl-C, and so it stays.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)


def end_in_order(*others: signal.Signals) -> None:
    """From now on Ctrl-C, and the signals named, raise KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _raise)
    for number in others:
        signal.signal(number, _raise)


@contextmanager
def while_importing() -> Iterator[None]:
    """Let Ctrl-C end the process at once in this block, which begins nothing."""
    before = signal.getsignal(signal.SIGINT)
    if before is _raise:
        signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        if before is _raise:
            signal.signal(signal.SIGINT, _raise)


def ignore() -> None:
    """From now on Ctrl-C does nothing: the work is done, and only Python has to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def interrupted() -> bool:
    """Whether a KeyboardInterrupt was raised, whatever has become of it since."""
    return _interrupted


def _end(number: int, frame: Any) -> NoReturn:
    del number, frame
    line = b"llmserve: interrupted\n"
    os.write(2, b"\n" + line if os.isatty(2) else line)
    os._exit(EXIT_CODE)


def _raise(number: int, frame: Any) -> NoReturn:
    global _interrupted
    del number, frame
    _interrupted = True
    # One raised in a destructor cannot be caught, and Python would print it.
    sys.unraisablehook = lambda _: None
    raise KeyboardInterrupt
