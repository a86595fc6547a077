"""Pages of caches in files, which outlive the process that computed them.

A folder of one user has a file for each page, named by a digest of all that its content depends on.
Any number of processes share it. What is in a file is believed only if its checksum holds and it
says its own name.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NAME_BYTES = 32
DEFAULT_LIMIT = 1_000_000_000
MOST_SECONDS = 7 * 24 * 3600.0
"""How long a page is kept that nobody uses."""

# The format, the page's name, its model's name, how many tokens it has, and how many bytes.
_HEAD = struct.Struct("<8s32s64sIQ")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _HEAD.size + _CHECKSUM.size
_FORMAT = b"llmpage1"
_LABEL_BYTES = 64
_USED = struct.Struct("<Q")

_LOCK = "lock"
_PAGE = re.compile(rf"[0-9a-f]{{{2 * NAME_BYTES}}}")
_UNFINISHED = ".new"
_BLOCK = 4096
# So much of the disk stays free for others.
_LEFT_FREE = 256 << 20
# Space is made for many pages at once: each time, all files are looked at.
_SHARE_KEPT = 0.9
# The mode of a page that is kept longer; of others it is 0600. So it needs no list of them, which
# processes would have to share.
_KEPT_LONGER = 0o400
_STEP_BACK = 1000
"""By how many nanoseconds a page counts as older than the one before it in the same text."""


class PageFolderError(Exception):
    """The folder cannot be used; the message says why."""


@dataclass(frozen=True)
class PageFile:
    """A page on disk, as far as its beginning tells."""

    label: str
    """The model's name."""
    tokens: int
    bytes: int
    used: float
    """When it was written or used last, in seconds since 1970."""


class PageFiles:
    """The pages in a folder, which take up to ``limit`` bytes in all.

    Those that were not used for longest go first, and of one text its end. Those that are kept
    longer, as of sessions, go after all others; they are at most half, and what is over goes before
    all others. Reading takes no lock; writers of all processes take turns.
    """

    def __init__(self, folder: Path, limit: int, *, most_seconds: float = MOST_SECONDS) -> None:
        self._folder = _open_folder(folder)
        self._limit, self._most_seconds = limit, most_seconds
        self._writing = threading.Lock()

    def close(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def read(self, name: bytes) -> bytes | None:
        """Return a page's content; None if there is none that can be believed."""
        try:
            file = self._open(name.hex(), os.O_RDONLY)
        except OSError:
            return None
        try:
            state = os.fstat(file)
            if not stat.S_ISREG(state.st_mode) or self._is_old(state):
                return None
            header = os.read(file, _HEADER_BYTES)
            content = os.read(file, state.st_size)
            if _holds(header, content, name):
                return content
        except OSError:
            return None
        finally:
            os.close(file)
        with suppress(OSError):
            os.unlink(name.hex(), dir_fd=self._folder)
        return None

    def exists(self, name: bytes) -> bool:
        """Return whether a page is there that is not too old; it may still be damaged."""
        try:
            state = os.stat(name.hex(), dir_fd=self._folder, follow_symlinks=False)
        except OSError:
            return False
        return not self._is_old(state)

    def write(self, name: bytes, content: bytes, *, label: str, tokens: int) -> bool:
        """Keep a page; return whether it is there now. Raise OSError if the disk refuses it."""
        size = _on_disk(_HEADER_BYTES + len(content))
        if size > self._limit:
            return False
        with self._writing, self._locked() as lock:
            if self.exists(name):
                return True
            system = os.fstatvfs(self._folder)
            if system.f_bavail * system.f_frsize < size + _LEFT_FREE:
                return False
            used = _read_used(lock)
            if used is None or used + size > self._limit:
                used = self._make_space(size)
            # A process that ends here has counted too much, until somebody makes space.
            os.pwrite(lock, _USED.pack(used + size), 0)
            try:
                self._write(name, content, label, tokens)
            except OSError:
                os.pwrite(lock, _USED.pack(used), 0)
                raise
        return True

    def touch(self, names: Sequence[bytes], *, longer: bool = False) -> list[bytes]:
        """Renew the pages of one text, in their order, and have them kept ``longer`` from now on;
        return those that are no longer there."""
        now, missing = time.time_ns(), []
        for depth, name in enumerate(names):
            # The end of a text is useful to fewer others than its beginning, so it goes first.
            when = now - depth * _STEP_BACK
            try:
                os.utime(name.hex(), ns=(when, when), dir_fd=self._folder, follow_symlinks=False)
            except OSError:
                missing.append(name)
                continue
            if longer:
                # Where no modes are kept, it goes as others do.
                with suppress(OSError):
                    self._mark(name)
        return missing

    def clear(self, label: str | None = None) -> int:
        """Remove all pages, or those of a model; return how many there were."""
        removed = 0
        with self._writing, self._locked() as lock:
            for name, _ in self._entries():
                if label is None or (page := self._describe(name)) is None or page.label == label:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=self._folder)
                        removed += 1
            os.ftruncate(lock, 0)
        return removed

    def pages(self) -> list[PageFile]:
        """Return what is there, as far as it can be read."""
        found = (self._describe(name) for name, _ in self._entries())
        return [page for page in found if page is not None]

    def _describe(self, name: str) -> PageFile | None:
        try:
            file = self._open(name, os.O_RDONLY)
        except OSError:
            return None
        try:
            state, header = os.fstat(file), os.read(file, _HEADER_BYTES)
        except OSError:
            return None
        finally:
            os.close(file)
        if len(header) < _HEADER_BYTES:
            return None
        form, _, label, tokens, _ = _HEAD.unpack_from(header)
        if form != _FORMAT:
            return None
        text = label.rstrip(b"\0").decode(errors="replace")
        return PageFile(text, tokens, _on_disk(state.st_size), state.st_mtime)

    def _write(self, name: bytes, content: bytes, label: str, tokens: int) -> None:
        head = _HEAD.pack(_FORMAT, name, label.encode()[:_LABEL_BYTES], tokens, len(content))
        checksum = _CHECKSUM.pack(zlib.crc32(content, zlib.crc32(head)))
        unfinished = name.hex() + _UNFINISHED
        try:
            file = self._open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                for part in (head + checksum, content):
                    rest = memoryview(part)
                    while rest:
                        rest = rest[os.write(file, rest) :]
            finally:
                os.close(file)
            os.rename(unfinished, name.hex(), src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=self._folder)
            raise

    def _mark(self, name: bytes) -> None:
        file = self._open(name.hex(), os.O_RDONLY)
        try:
            os.fchmod(file, _KEPT_LONGER)
        finally:
            os.close(file)

    def _make_space(self, size: int) -> int:
        """Remove what is old until there is space; return how many bytes the others take."""
        entries = self._in_order()
        used = sum(_on_disk(state.st_size) for _, state in entries)
        if used + size <= self._limit:
            most = self._limit
        else:
            most = min(int(_SHARE_KEPT * self._limit), self._limit - size)
        for name, state in entries:
            if used <= most and not self._is_old(state):
                break
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)
            used -= _on_disk(state.st_size)
        return used

    def _in_order(self) -> list[tuple[str, os.stat_result]]:
        """Return all entries: those that go first come first."""
        newest = sorted(self._entries(), key=lambda entry: entry[1].st_mtime_ns, reverse=True)
        surplus: list[tuple[str, os.stat_result]] = []
        others: list[tuple[str, os.stat_result]] = []
        kept: list[tuple[str, os.stat_result]] = []
        left = self._limit // 2
        for entry in newest:
            state = entry[1]
            if stat.S_IMODE(state.st_mode) != _KEPT_LONGER:
                others.append(entry)
                continue
            left -= _on_disk(state.st_size)
            (kept if left >= 0 else surplus).append(entry)
        ordered = [*reversed(surplus), *reversed(others), *reversed(kept)]
        # Nobody reads the old ones any more.
        return sorted(ordered, key=lambda entry: not self._is_old(entry[1]))

    def _entries(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the files of pages, and what writers left that ended early."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _PAGE.fullmatch(entry.name.removesuffix(_UNFINISHED)):
                    with suppress(FileNotFoundError):
                        yield entry.name, entry.stat(follow_symlinks=False)

    def _is_old(self, state: os.stat_result) -> bool:
        return time.time() - state.st_mtime > self._most_seconds

    def _open(self, name: str, flags: int) -> int:
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(name, flags, 0o600, dir_fd=self._folder)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Have the folder for this writer alone; the file of the lock says how much is used."""
        lock = self._open(_LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)


def _open_folder(folder: Path) -> int:
    """Open a folder that nobody else can read, and make it if there is none."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if folder.is_symlink():
            raise PageFolderError(f"{folder} is a link") from None
        raise PageFolderError(f"{folder} cannot be opened ({error.strerror})") from None
    state = os.fstat(opened)
    problem = ""
    if state.st_uid != os.geteuid():
        problem = "belongs to another user"
    elif stat.S_IMODE(state.st_mode) & 0o077:
        problem = "can be read by other users"
    if problem:
        os.close(opened)
        raise PageFolderError(f"{folder} {problem}")
    return opened


def _holds(header: bytes, content: bytes, name: bytes) -> bool:
    if len(header) < _HEADER_BYTES:
        return False
    form, own_name, _, _, length = _HEAD.unpack_from(header)
    (checksum,) = _CHECKSUM.unpack_from(header, _HEAD.size)
    if form != _FORMAT or own_name != name or length != len(content):
        return False
    return bool(checksum == zlib.crc32(content, zlib.crc32(header[: _HEAD.size])))


def _read_used(lock: int) -> int | None:
    content = os.pread(lock, _USED.size, 0)
    return int(_USED.unpack(content)[0]) if len(content) == _USED.size else None


def _on_disk(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
