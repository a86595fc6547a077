"""Files of a server that are its user's alone, also in a folder that other users write to."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

from llmserve.errors import ServerError


def new_log(name: str, folder: Path | None = None) -> Path:
    """Create a log whose name nobody can know in advance, by default in TMPDIR."""
    handle, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log", dir=folder)
    os.close(handle)
    return Path(path)


def open_log(path: Path) -> BinaryIO:
    """Open a log to append to it, and create it if there is none.

    Raises an error for a link, and for a file that is not this user's alone: another user may have
    put it there, to read what is written or to have it written elsewhere.
    """
    # Otherwise, opening a named pipe would wait for its reader.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o600)
    except OSError as error:
        reason = "it is a link" if path.is_symlink() else error.strerror
        raise ServerError(f"cannot write the log to {path} ({reason})") from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
        os.close(handle)
        raise ServerError(f"cannot write the log to {path} (it is not a file of this user alone)")
    os.fchmod(handle, 0o600)
    return os.fdopen(handle, "ab")


def check_temporary(folder: Path) -> None:
    """Raise if other users could replace what a server has in a folder."""
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ServerError(
            f"every user can replace files in {folder}",
            hint=f"chmod +t {folder}, or set TMPDIR to a folder of your own",
        )
