"""UTF-8 inside Triton's stub, whose Python decodes as ASCII whatever the locale is.

The stub starts Python without reading the locale, so files, programs' output and ``print``
would be ASCII. The locale can still be set. The encoding of file names cannot: a folder whose
name is not ASCII is reached by another name that is.
"""

from __future__ import annotations

import contextlib
import io
import locale
import os
import sys
from pathlib import Path

_LOCALES = ("C.UTF-8", "en_US.UTF-8", "")
# Libraries look for their caches and the like below these.
_FOLDERS = ("HOME", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "TMPDIR")


def use_utf8() -> None:
    """Make UTF-8 the default of files and streams, and usual folders reachable."""
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
    """Return a folder by a name that this Python can open, and that is UTF-8 to everybody else.

    It holds for as long as this process lives, for programs that it starts as well.
    """
    if path.isascii() or sys.getfilesystemencoding() == "utf-8":
        return Path(path)
    descriptor = os.open(path.encode("utf-8", "surrogateescape"), os.O_PATH | os.O_DIRECTORY)
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")
