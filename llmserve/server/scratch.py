"""Folders that servers and frontends have to themselves while they run."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from llmserve.errors import ServerError
from llmserve.server.guard import LOCK, remove_leftovers


def scratch_folder() -> Path:
    """Return where TMPDIR says, unless Triton's shell would trip over it."""
    folder = tempfile.gettempdir()
    return Path(folder if re.fullmatch(r"[\w./+-]+", folder, re.ASCII) else "/tmp")


def make_scratch() -> tuple[str, Path]:
    """Return a name that nothing else has, and a folder that is called after it."""
    name = f"llmserve-{secrets.token_hex(6)}"
    folder = scratch_folder()
    try:
        return name, Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
    except OSError as error:
        raise ServerError(
            f"cannot write to {folder} ({error.strerror})",
            mend="set TMPDIR to a folder whose path is made of ASCII letters and digits",
        ) from None


_LAID_OUT = 60.0
"""Seconds after which a folder has its guard, if it will ever have one."""


def sweep() -> None:
    """Remove what is left of this user's servers that were killed with their guards and all."""
    for folder in scratch_folder().glob("llmserve-*-*"):
        named = re.fullmatch(r"(llmserve-[0-9a-f]{12})-\w+", folder.name)
        with suppress(OSError):
            found = folder.lstat()
            if not named or not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            with (folder / LOCK).open("rb") as file:
                if time.time() - os.fstat(file.fileno()).st_mtime < _LAID_OUT:
                    continue
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_leftovers(named[1], folder)
