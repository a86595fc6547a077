"""What makes a Python that decodes as ASCII, as the one in Triton's stub does, use UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PREPARE = "from llmserve.runtime.utf8 import use_utf8, reachable; "


def run(code: str, *args: str, locale: str = "C", **env: str) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "LC_ALL": locale,
        # So that this Python is as the stub's is.
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env={name: value for name, value in (environment | env).items() if value},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout.decode()


@pytest.mark.parametrize("locale", ["", "C", "POSIX", "xx_XX.nowhere"])
def test_files_programs_and_output_are_utf8(tmp_path: Path, locale: str) -> None:
    file = tmp_path / "text"
    file.write_text("«café»", encoding="utf-8")
    read = (
        "import subprocess, sys; assert sys.getfilesystemencoding() == 'ascii'; use_utf8(); "
        "text = open(sys.argv[1]).read(); "  # as somebody's library does it
        "text += subprocess.run(['cat', sys.argv[1]], capture_output=True, text=True).stdout; "
        "print(text)"
    )
    assert run(PREPARE + read, str(file), locale=locale) == "«café»«café»\n"


def test_without_it_such_a_file_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("«café»", encoding="utf-8")
    with pytest.raises(AssertionError, match="UnicodeDecodeError"):
        run("import sys; open(sys.argv[1]).read()", str(file))


def test_folders_whose_names_are_not_ascii_can_be_reached(tmp_path: Path) -> None:
    home = tmp_path / "Zoë" / "модели"
    home.mkdir(parents=True)
    (home / "a").write_text("found", encoding="utf-8")
    # Triton passes the model's folder as text, the environment comes as bytes.
    code = (
        "import os, subprocess; use_utf8(); home = os.environ['HOME']; assert home.isascii(); "
        "here = reachable(bytes.fromhex(os.environ['FOLDER']).decode()); "
        "print(open(home + '/a').read(), (here / 'a').read_text(), "
        "subprocess.run(['cat', here / 'a'], capture_output=True, text=True).stdout)"
    )
    found = run(PREPARE + code, HOME=str(home), FOLDER=str(home).encode().hex())
    assert found == "found found found\n"


def test_a_home_that_is_not_there_is_left_alone() -> None:
    code = "import os; use_utf8(); print(ascii(os.environ['HOME']))"
    assert run(PREPARE + code, HOME="/nowhere/Zoë") == "'/nowhere/Zo\\udcc3\\udcab'\n"
