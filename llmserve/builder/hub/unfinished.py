"""A file of the hub that is on its way: what there is of it stays for the next time."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from llmserve.builder.hub.cache import Cache
from llmserve.builder.hub.failures import HubError
from llmserve.builder.hub.listing import HubFile
from llmserve.errors import OutputError

_BLOCK = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class UnfinishedFile:
    """A content that is not whole yet; ``size`` is what there is of it."""

    def __init__(self, file: HubFile, cache: Cache) -> None:
        self.file = file
        self._cache = cache
        self._path = cache.part(file)
        self.size = self._path.stat().st_size if self._path.exists() else 0
        self._handle = -1
        self._hash: _Hash | None = None

    @property
    def expected(self) -> int:
        """The bytes of the whole, as far as the hub says."""
        return self.size if self.file.size is None else self.file.size

    @contextmanager
    def opened(self, is_stopped: Callable[[], bool]) -> Iterator[None]:
        """Open it for writing, after what is there."""
        with self._writing():
            self._handle = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666)
        try:
            self._hash = self._new_hash()
            read = 0
            while self._hash and not is_stopped() and (block := os.read(self._handle, _BLOCK)):
                self._hash.update(block)
                read += len(block)
            if self.file.size is not None and self.size > self.file.size:
                self.restart()
            os.lseek(self._handle, self.size, os.SEEK_SET)
            yield
        finally:
            os.close(self._handle)

    def write(self, data: bytes) -> None:
        if self.file.size is not None and self.size + len(data) > self.file.size:
            self.restart()
            raise HubError(
                f"{self.file.name} is larger than the hub says", hint="try again, or another hub"
            )
        left = memoryview(data)
        with self._writing():
            while left:
                written = os.write(self._handle, left)
                self.size += written
                left = left[written:]
        if self._hash:
            self._hash.update(data)

    def restart(self) -> None:
        """Forget what there is."""
        with self._writing():
            os.ftruncate(self._handle, 0)
            os.lseek(self._handle, 0, os.SEEK_SET)
        self.size, self._hash = 0, self._new_hash()

    def is_right(self) -> bool:
        """Return whether the whole is what the hub says it is."""
        return self._hash is None or self._hash.hexdigest() == self.file.blob

    def finish(self) -> None:
        """Give the whole its name."""
        with self._writing():
            self._path.replace(self._cache.content(self.file))

    def _new_hash(self) -> _Hash | None:
        if not self.file.is_hash:
            return None
        if len(self.file.blob) == hashlib.sha256().digest_size * 2:
            return hashlib.sha256()
        # As git names the content of a file.
        return hashlib.sha1(b"blob %d\0" % self.expected, usedforsecurity=False)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            folder = self._cache.folder.parent
            if error.errno in _FULL:
                raise OutputError(
                    f"the disk of {folder} is full",
                    hint="make some space: the same command goes on from what is there; HF_HOME "
                    "names a folder on another disk",
                ) from None
            raise OutputError(
                f"{folder} cannot be written: {error.strerror}", hint="name another in HF_HOME"
            ) from None
