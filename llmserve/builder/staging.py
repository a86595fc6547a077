"""Where a model lies while it is built: beside the repository, and gone when the build is."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmserve.builder.swap import MODELS, undo
from llmserve.errors import OutputError

__all__ = ["MODELS", "locked", "staging"]


@contextmanager
def staging(output: Path) -> Iterator[Path]:
    """Lend a folder on the repository's own file system; what is left in it is thrown away.

    It lies beside the repository, for Triton does not start over a folder that is no model.
    A build that was killed leaves its stage behind; the next one sweeps it away.
    """
    output = output.absolute()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _sweep(output)
        folder, handle = _claim(output)
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error.strerror}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Keep two builds into one repository from crossing; the folder itself is the lock."""
    handle = os.open(output, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _prefix(output: Path) -> str:
    return f".{output.name}.llmserve-build-"


def _claim(output: Path) -> tuple[Path, int]:
    """Make a stage and lock it: the lock, which ends with its process, says that it is in use.

    A process id in its name would not do: another container's processes are not to be seen.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(output), dir=output.parent))
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            # Swept away before it was locked.
            continue
        fcntl.flock(handle, fcntl.LOCK_EX)
        if folder.exists():
            return folder, handle
        os.close(handle)


def _sweep(output: Path) -> None:
    """Remove the stages of builds that are no more."""
    for stage in [p for p in output.parent.iterdir() if p.name.startswith(_prefix(output))]:
        try:
            handle = os.open(stage, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _put_back(stage, output)
            shutil.rmtree(stage, ignore_errors=True)
        except BlockingIOError:
            # Its build is under way.
            continue
        finally:
            os.close(handle)


def _put_back(stage: Path, output: Path) -> None:
    """Bring back the models that their build had set aside when it was killed."""
    if output.is_dir():
        with locked(output):
            undo(stage, output)
