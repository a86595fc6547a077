"""The memory of files that are mapped into this process."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path

_DONTNEED = 4
_MAPPING = re.compile(
    r"(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) (?P<kind>\S+) \S+ \S+ \S+ +(?P<file>/.*)"
)


def release(file: Path) -> None:
    """Give back what a mapped file has in memory here; what is read again is mapped again.

    The system would take it back only when other programs need it, and count it until then. Only
    mappings that cannot be written are released: there, nothing can be lost.
    """
    # Where this is not Linux, there is nothing to release.
    with suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        name = str(file.resolve())
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            found = _MAPPING.match(line)
            if found and found["file"] == name and "w" not in found["kind"]:
                start, stop = int(found["start"], 16), int(found["stop"], 16)
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED)
