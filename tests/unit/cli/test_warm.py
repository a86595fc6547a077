"""`llmserve warm`: what is kept of prompts is listed and deleted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmserve.runtime import PageFiles
from llmserve_cli.group import cli


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli, ["warm", *words], standalone_mode=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "pages"


def test_there_is_nothing_at_first(folder: Path) -> None:
    assert invoke("list").stderr == "llmserve: nothing is kept of prompts\n"
    assert json.loads(invoke("list", "--json").stdout) == []
    assert invoke("clear").stderr == "llmserve: 0 pages are deleted\n"
    assert not folder.exists(), "looking creates nothing"


def test_pages_are_listed_by_model_and_cleared(folder: Path) -> None:
    files = PageFiles(folder, 100_000_000)
    for number, label in enumerate(["one", "two", "two"]):
        assert files.write(bytes([number]) * 32, bytes(3_000_000), label=label, tokens=32)
    lines = [line.split() for line in invoke("list").stdout.splitlines()]
    assert lines == [
        ["MODEL", "TOKENS", "MB", "USED"],
        ["one", "32", "3", "now"],
        ["two", "64", "6", "now"],
    ]
    sizes = {each["model"]: each["pages"] for each in json.loads(invoke("list", "--json").stdout)}
    assert sizes == {"one": 1, "two": 2}
    assert invoke("clear", "two").stderr == "llmserve: 2 pages are deleted\n"
    assert [page.label for page in files.pages()] == ["one"]
    assert invoke("clear").stderr == "llmserve: 1 pages are deleted\n"


def test_a_folder_of_others_is_left_alone(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o755)
    error = invoke("list").exception
    assert str(error) == (f"{folder} can be read by other users: delete it, or set LLMSERVE_HOME")
