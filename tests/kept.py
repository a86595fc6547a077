"""What takes long to make, kept in the folder ``build`` until what it is made from changes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

# Not from tests.support: `make run` has nothing that only tests need.
ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "kept"


def kept(name: str, make: Callable[[Path], None], *made_from: str | Path) -> Path:
    """Return a folder that ``make`` has filled, now or in an earlier run.

    ``made_from`` has the sources that decide what is in it, as files and folders, and anything else
    that does, as text. What was made from others under this name is removed.
    """
    digest = hashlib.sha256()
    for source in made_from:
        for part in _parts(source):
            digest.update(hashlib.sha256(part).digest())
    root = KEPT / name
    folder = root / digest.hexdigest()[:16]
    with locked(root):
        if not folder.is_dir():
            for old in root.iterdir():
                shutil.rmtree(old, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=root) as scratch:
                made = Path(scratch, "made")
                make(made)
                made.rename(folder)
    return folder


def installed(*names: str) -> str:
    """Return the versions of packages, as text that goes with sources."""
    return " ".join(f"{name}=={version(name)}" for name in names)


def linked(folder: Path, target: Path) -> Path:
    """Copy a folder; its files are linked where that is possible, because they are large."""

    def link(source: str, copy: str) -> None:
        try:
            os.link(source, copy)
        except OSError:
            shutil.copyfile(source, copy)

    return Path(shutil.copytree(folder, target, copy_function=link))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time do this: tests run in several."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _parts(source: str | Path) -> Iterator[bytes]:
    if isinstance(source, str):
        yield source.encode()
    elif source.is_file():
        yield source.read_bytes()
    else:
        for path in sorted(source.rglob("*.py")):
            yield str(path.relative_to(source)).encode()
            yield path.read_bytes()
