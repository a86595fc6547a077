"""Places are tried before work begins, and are as they were."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from llmserve.commands import check_file, check_folder
from llmserve.errors import UsageError

NAMES = ("index.html", "report.json")
_NOBODY = 65534


def state(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Return what is in a folder, and when it was changed."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        target = str(path.readlink()) if path.is_symlink() else ""
        found[str(path)] = (status.st_mode, status.st_mtime_ns, target)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "in").mkdir()
    (tmp_path / "half" / "report.json").mkdir(parents=True)
    for name, target in {"link": "file", "dangling": "in/new", "nowhere": "none/new"}.items():
        (tmp_path / name).symlink_to(target)
    (tmp_path / "round").symlink_to("round")
    return tmp_path


@pytest.mark.parametrize("name", ["file", "new", "in/new", "pipe", "link", "dangling"])
def test_a_file_that_can_be_written_is_left_as_it_is(folder: Path, name: str) -> None:
    before = state(folder)
    check_file(folder / name)
    assert state(folder) == before


@pytest.mark.parametrize("name", ["in", "new", "new/below/it"])
def test_a_folder_is_not_made_before_it_is_needed(folder: Path, name: str) -> None:
    before = state(folder)
    check_folder(folder / name, *NAMES)
    assert state(folder) == before


@pytest.mark.parametrize(
    ("check", "name", "words"),
    [
        (check_file, "in", "in cannot be written: Is a directory"),
        (check_file, "none/new", "none/new cannot be written: No such file or directory"),
        (check_file, "file/new", "file/new cannot be written: Not a directory"),
        (check_file, "nowhere", "nowhere cannot be written: No such file or directory"),
        (check_file, "round", "round cannot be written: Too many levels of symbolic links"),
        (check_file, "n" * 300, "cannot be written: File name too long"),
        (check_folder, "file", "file cannot be written: Not a directory"),
        (check_folder, "file/new", "file/new cannot be written: Not a directory"),
        (check_folder, "dangling", "dangling cannot be written: No such file or directory"),
        (check_folder, "n" * 300, "cannot be written: File name too long"),
        (check_folder, "half", "half/report.json cannot be written: Is a directory"),
    ],
)
def test_what_cannot_be_written_is_refused(
    folder: Path, check: Callable[..., None], name: str, words: str
) -> None:
    before = state(folder)
    with pytest.raises(UsageError, match=words):
        check(folder / name, *(NAMES if check is check_folder else ()))
    assert state(folder) == before


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder and files that may be read and not written, also if the tests run as root."""
    with TemporaryDirectory() as name:
        folder, user = Path(name), os.geteuid()
        (folder / "file").write_text("kept", encoding="utf-8")
        os.mkfifo(folder / "pipe")
        for path in (*folder.iterdir(), folder):
            path.chmod(0o555)
        os.seteuid(user or _NOBODY)
        try:
            yield folder
        finally:
            os.seteuid(user)
            folder.chmod(0o755)


def test_what_a_user_may_not_write_is_refused(readable: Path) -> None:
    for name in ("file", "pipe", "new"):
        with pytest.raises(UsageError, match=f"{name} cannot be written: Permission denied"):
            check_file(readable / name)
    for path in (readable, readable / "new"):
        with pytest.raises(UsageError, match="cannot be written: Permission denied"):
            check_folder(path, *NAMES)
