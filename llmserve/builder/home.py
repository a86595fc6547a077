"""The folder for what llmserve keeps of its user, which nobody else may write to."""

from __future__ import annotations

import os
from pathlib import Path

from llmserve.errors import ConfigError, OutputError

HOME = "LLMSERVE_HOME"
"""The environment variable that names the folder."""
_OTHERS_MAY_WRITE = 0o022


def home() -> Path:
    """Return the folder for what llmserve keeps of this user: by default in the user's cache."""
    if named := os.environ.get(HOME):
        return Path(named).expanduser().absolute()
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise ConfigError("this user has no home folder", hint=f"set {HOME} to a folder") from None
    return cache.absolute() / "llmserve"


def pages_folder() -> Path:
    """Return the folder in which engines keep pages of their caches (``serve --warm``)."""
    return home() / "pages"


def make_private(folder: Path, *parts: str) -> None:
    """Create the folder and parts of it; refuse one into which others could put what we believe."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        for part in parts:
            (folder / part).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{folder} cannot be written: {error.strerror}", hint=f"set {HOME} to another folder"
        ) from None
    if status.st_uid != os.getuid() or status.st_mode & _OTHERS_MAY_WRITE:
        raise ConfigError(
            f"other users may write to {folder}",
            hint=f"chmod 700 it, or set {HOME} to another folder",
        )
