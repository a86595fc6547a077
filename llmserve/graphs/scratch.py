"""Arrays in a file that is deleted when it is closed: memory has them as long as it has space."""

from __future__ import annotations

import os
import tempfile
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

# OpenVINO maps constants to whole lines of a processor's cache.
_LINE = 64


class Scratch:
    """A file in a folder, for arrays that are made one after the other and read again later."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._end = 0

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array to be filled; a full disk is an error here, and not when it is."""
        start = self._end + -self._end % _LINE
        size = max(1, prod(shape) * np.dtype(dtype).itemsize)
        os.posix_fallocate(self._file.fileno(), start, size)
        self._end = start + size
        return np.memmap(self._file, dtype, "r+", start, shape)

    def kept(self, array: Any) -> Any:
        """Return a copy of an array."""
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy
