"""Putting a finished model into its repository: all of it or nothing."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmserve import modelconfig
from llmserve.errors import OutputError
from llmserve.manifest import Manifest


@contextmanager
def staging(output: Path) -> Iterator[Path]:
    """Lend a folder on the repository's own file system; what is left in it is thrown away.

    It lies beside the repository, for Triton does not start over a folder that is no model.
    """
    output = output.absolute()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error.strerror}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_output(output: Path, name: str, *, force: bool) -> None:
    """Refuse an output that holds something else, and a model that is not ours to replace."""
    if not output.exists():
        return
    if not output.is_dir():
        raise OutputError(f"{output} is a file", mend="name a folder with --output")
    strangers = sorted(
        path.name
        for path in output.iterdir()
        if path.is_dir() and not path.name.startswith(".") and not _is_model(path)
    )
    if strangers:
        raise OutputError(
            f"{output} holds something else: {strangers[0]}/ is no Triton model",
            mend="name a new or empty folder with --output",
        )
    target = output / name
    if not target.exists() or force:
        return
    manifest = Manifest.read(target)
    if manifest is None:
        raise OutputError(
            f"{target} was not built by llmserve", mend="give another --name, or --force to replace"
        )
    edits = [line for line in manifest.differences(target) if not line.endswith("is missing")]
    if edits:
        raise OutputError(
            f"{target} was edited since it was built: {edits[0]}",
            mend="give another --name, or --force to replace",
        )


def publish(staged: Path, output: Path, name: str, *, force: bool) -> None:
    """Move a staged model into the repository; on any failure the old one stays or comes back."""
    output.mkdir(parents=True, exist_ok=True)
    with _locked(output):
        check_output(output, name, force=force)
        target, aside = output / name, staged.parent / f"{staged.name}.old"
        replaced = target.exists()
        if replaced:
            target.rename(aside)
        try:
            staged.rename(target)
        except BaseException:
            if replaced:
                aside.rename(target)
            raise


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Keep two builds into one repository from crossing; the folder itself is the lock."""
    handle = os.open(output, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _is_model(folder: Path) -> bool:
    versions = (child for child in folder.iterdir() if child.is_dir() and child.name.isdigit())
    return (folder / modelconfig.FILE).is_file() or any(versions)
