"""Enables UTF-8 inside Triton's stub, whose Python uses ASCII whatever the locale is.

The stub starts Python without reading the locale, so files, output of programs and ``print``
would be ASCII. The locale can still be set, but not the encoding of file names: a folder whose
name is not ASCII is opened through another path that is.
"""

from __future__ import annotations

import contextlib
import io
import locale
import os
import sys
from pathlib import Path

_LOCALES = ("C.UTF-8", "en_US.UTF-8", "")
# Libraries keep their caches and similar files below these folders.
_FOLDERS = ("HOME", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "TMPDIR")


def use_utf8() -> None:
    """Make UTF-8 the default for files and streams, and the usual folders reachable."""
    for name in _LOCALES:
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
        if locale.getpreferredencoding(False).upper() == "UTF-8":
            break
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    for name in _FOLDERS:
        if value := os.environ.get(name):
            with contextlib.suppress(OSError):
                os.environ[name] = str(reachable(value))


def reachable(path: str) -> Path:
    """Return a path that this Python can open for a folder whose name is in UTF-8.

    The path is valid as long as this process lives, also in programs that it starts.
    """
    if path.isascii() or sys.getfilesystemencoding() == "utf-8":
        return Path(path)
    descriptor = os.open(path.encode("utf-8", "surrogateescape"), os.O_PATH | os.O_DIRECTORY)
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")
