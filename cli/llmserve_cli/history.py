"""What was typed in conversations, for the next ones: a file of this user alone."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prompt_toolkit.history import History

HISTORY = "LLMSERVE_HISTORY"
"""The environment variable that names the file; empty, nothing is kept."""
_LARGEST, _KEPT = 1 << 20, 1 << 18
_ENTRY = b"\n# "
"""Each entry of prompt_toolkit's file begins with the time, as a comment."""


def history() -> History:
    """Return what was typed before; of this conversation alone, if there is no place to keep it."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    with suppress(OSError, RuntimeError):
        path = _path()
        if path is not None and _is_ready(path):
            return FileHistory(str(path))
    return InMemoryHistory()


def _path() -> Path | None:
    named = os.environ.get(HISTORY)
    if named is not None:
        return Path(named).expanduser() if named else None
    state = os.environ.get("XDG_STATE_HOME")
    folder = Path(state) if state else Path.home() / ".local" / "state"
    return folder / "llmserve" / "history"


def _is_ready(path: Path) -> bool:
    """Create the file, and return whether it is this user's alone; one that is too long is cut."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0) as file:
        found = os.fstat(file.fileno())
        ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
        if not ours or found.st_mode & 0o077:
            return False
        if found.st_size > _LARGEST:
            file.seek(-_KEPT, os.SEEK_END)
            kept = file.read()
            # From the beginning of an entry on.
            kept = kept[max(kept.find(_ENTRY), 0) :]
            file.truncate(0)
            file.write(kept)
    return True
