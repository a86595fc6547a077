"""Whether files can be written where a user wants them, without changing what is there."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from tempfile import TemporaryFile

from llmserve.errors import UsageError


def check_file(path: Path) -> None:
    """Refuse a place that cannot be written to."""
    try:
        _try_file(path)
    except OSError as error:
        raise _refused(path, error) from None


def check_folder(path: Path, *names: str) -> None:
    """Refuse a folder in which files of these names cannot be written; it may not be there yet."""
    try:
        is_there = _is_folder(path)
    except OSError as error:
        raise _refused(path, error) from None
    for name in names if is_there else ():
        check_file(path / name)


def _try_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        # What a link leads to is what would be written.
        _try_new(Path(os.path.realpath(path)).parent)
        return
    if stat.S_ISREG(mode):
        os.close(os.open(path, os.O_WRONLY))
    elif stat.S_ISDIR(mode):
        raise _error(errno.EISDIR)
    elif not os.access(path, os.W_OK, effective_ids=True):
        # A pipe is not opened: that would wait for its reader, or end what the reader reads.
        raise _error(errno.EACCES)


def _is_folder(path: Path) -> bool:
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            raise _error(errno.ENOTDIR)
    except FileNotFoundError:
        if path.is_symlink():
            raise
        _try_new(next(parent for parent in path.absolute().parents if parent.exists()))
        return False
    return True


def _try_new(folder: Path) -> None:
    """Try whether a file can be made in a folder, by one that has no name or loses it at once."""
    TemporaryFile(dir=folder).close()


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _refused(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be written: {error.strerror}", hint="give another place")
