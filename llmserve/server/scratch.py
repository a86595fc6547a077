"""Folders that servers and frontends have to themselves while they run."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from llmserve.errors import ServerError


def make_scratch(name: str) -> Path:
    """Make the server's folder: where TMPDIR says, unless Triton's shell would trip over it."""
    folder = tempfile.gettempdir()
    if not re.fullmatch(r"[\w./+-]+", folder, re.ASCII):
        folder = "/tmp"  # noqa: S108
    try:
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
    except OSError as error:
        raise ServerError(
            f"cannot write to {folder} ({error.strerror})",
            mend="set TMPDIR to a folder whose path is made of ASCII letters and digits",
        ) from None
