"""What a server writes is its user's alone, and goes where nobody else has led it."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.errors import ServerError
from llmserve.server.find.launch import Launch
from llmserve.server.run.frontend import log_beside
from llmserve.server.run.private import check_temporary, open_log
from llmserve.server.run.process import GuardedProcess, make_scratch

FRONTEND: Any = SimpleNamespace(name="gateway")


@pytest.fixture(autouse=True)
def careless() -> Iterator[None]:
    """The user's own setting lets everyone read and write new files."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_log_is_new_and_private_or_the_users_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for text in (b"one", b"two"):
        with open_log(log) as file:
            file.write(text)
    assert log.read_bytes() == b"onetwo"
    assert mode(log) == 0o600


def test_a_log_that_someone_has_prepared_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.link(target, tmp_path / "second-name")
    os.mkfifo(tmp_path / "pipe")
    names = ["link", "dangling", "second-name", "pipe", "missing/log", "."]
    if os.getuid() == 0:
        (tmp_path / "others").touch()
        os.chown(tmp_path / "others", 1001, 1001)
        names.append("others")
    for name in names:
        with pytest.raises(ServerError, match=r"cannot write the log to .* \(") as refused:
            open_log(tmp_path / name)
        assert "\n" not in str(refused.value)
    assert target.read_text() == "untouched"
    assert not (tmp_path / "nothing").exists()


def test_nobody_can_know_the_name_of_a_frontends_log(tmp_path: Path) -> None:
    log = tmp_path / "llmserve-x.log"
    planted = tmp_path / "llmserve-x-gateway.log"
    planted.symlink_to(tmp_path / "elsewhere")
    first, second = (log_beside(log, FRONTEND, chosen=False) for _ in range(2))
    assert len({first, second, planted}) == 3
    assert mode(first) == 0o600
    # A name that the user has chosen stays, and the link is refused when the log is opened.
    assert log_beside(log, FRONTEND, chosen=True) == planted
    with pytest.raises(ServerError, match="it is a link"):
        open_log(planted)


def test_what_a_server_writes_is_private(tmp_path: Path) -> None:
    code = f"""if True:
        import os
        os.chdir({str(tmp_path)!r})
        os.mkdir("folder")
        # As the library does that creates Triton's shared memory.
        with open("memory", "w") as file:
            os.fchmod(file.fileno(), 0o644)
        # Whatever else a program does with modes works.
        with open("shared", "w") as file:
            os.fchmod(file.fileno(), 0o640)
        os.chmod("folder", 0o755)
        os.mkdir("folder/inner")
    """
    name, scratch = make_scratch()
    assert mode(scratch) == 0o700
    process = GuardedProcess(
        Launch((sys.executable, "-c", code), os.environ, "test"),
        name, scratch, tmp_path / "log", grace=1.0,
    )  # fmt: skip
    assert process.wait(60) == 0
    process.stop(0.0)
    assert {path.name: oct(mode(path)) for path in tmp_path.rglob("*")} == {
        "folder": "0o755", "inner": "0o700", "log": "0o600", "memory": "0o600", "shared": "0o640",
    }  # fmt: skip


def test_a_temporary_folder_in_which_others_can_replace_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ServerError, match=r"every user can replace files in .*: chmod \+t"):
        make_scratch()
    assert not list(tmp_path.iterdir())
    tmp_path.chmod(0o1777)
    check_temporary(tmp_path)
    tmp_path.chmod(0o755)
    check_temporary(tmp_path)
