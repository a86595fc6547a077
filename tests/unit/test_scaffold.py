"""What `llmserve plugin new` writes: whole packages, under any name, over nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmserve import __version__
from llmserve.api import API
from llmserve.errors import OutputError, UsageError
from llmserve.scaffold import KINDS, ROLES, new_package
from llmserve.scaffold.generate import Names
from llmserve_cli.group import cli

NAMES = ("x", "acme-words", "a-name-of-thirty-two-letters-abc")


def files(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("role", ROLES)
def test_a_package_is_whole_and_nothing_of_it_is_called_scaffold(
    tmp_path: Path, role: str, name: str
) -> None:
    folder = new_package(name, role, tmp_path)
    found = files(folder)
    package = f"llmserve_{name.replace('-', '_')}"
    slug = name.replace("-", "_")
    assert {
        ".gitignore", "README.md", "pyproject.toml",
        f"{package}/__init__.py", f"{package}/py.typed",
        f"tests/test_{slug}.py", f"tests/test_{slug}_conformance.py",
    } <= set(found)  # fmt: skip
    assert not [path for path, text in found.items() if "scaffold" in (path + text).lower()]
    assert (
        f'[project.entry-points."llmserve.api{API}"]\n{name} = "{package}"'
        in found["pyproject.toml"]
    )
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("name", NAMES)
def test_a_package_is_in_order_as_its_own_linters_see_it(tmp_path: Path, name: str) -> None:
    for role in KINDS:
        new_package(name, role, tmp_path / role)
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("role", ROLES)
def test_it_asks_for_the_llmserve_that_made_it(tmp_path: Path, role: str) -> None:
    from packaging.requirements import Requirement

    text = files(new_package("acme", role, tmp_path))["pyproject.toml"]
    requirements = [Requirement(found) for found in re.findall(r'(?m)^    "(.+)",$', text)]
    ranges = {requirement.name: requirement.specifier for requirement in requirements}
    assert __version__ in ranges["llmserve"]
    assert "99.0" not in ranges["llmserve"]


@pytest.mark.parametrize(
    "name", ["", "Acme", "1acme", "acme_words", "acme--words", "-acme", "acme-", "a.b", "a/b", "..",
             "a" * 33, "é", "acme words", "acme\n"],
)  # fmt: skip
def test_a_name_that_a_package_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="as in acme-words"):
        new_package(name, "recipe", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_name_needs_no_llmserve_before_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave out llmserve"):
        new_package("llmserve-acme", "recipe", tmp_path)


@pytest.mark.parametrize(
    ("name", "role", "why"),
    [
        ("hf", "tokenizer", "it is plugin 'hf'"),
        ("core", "recipe", "it is plugin 'core'"),
        ("dynamic", "batching", "'core' .* has a batching of that name"),
        ("text", "formatter", "'core' .* has a formatter of that name"),
        ("cli", "recipe", "llmserve-cli is installed here"),
    ],
)
def test_a_name_that_is_taken_is_refused(tmp_path: Path, name: str, role: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"the name '{name}' is taken: .*{why}"):
        new_package(name, role, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_name_of_another_role_is_free(tmp_path: Path) -> None:
    assert new_package("text", "tokenizer", tmp_path).is_dir()


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_nothing_is_overwritten(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "llmserve-acme"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="is there already"):
        new_package("acme", "recipe", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["llmserve-acme"]


def test_an_output_that_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="cannot be written to"):
        new_package("acme", "recipe", tmp_path / "file")


def test_names_that_contain_a_role_are_not_doubled() -> None:
    text = "ScaffoldTokenizer"
    assert Names.of("acme-tokenizer").replaced(text, "tokenizer") == "AcmeTokenizer"
    assert Names.of("acme").replaced(text, "tokenizer") == "AcmeTokenizer"
    assert Names.of("tokenizer").replaced(text, "tokenizer") == "TokenizerTokenizer"


@pytest.mark.parametrize("role", ROLES)
def test_the_command_prints_the_folder_and_says_what_next(tmp_path: Path, role: str) -> None:
    words = ["plugin", "new", "acme", "--role", role, "--output", str(tmp_path / "new")]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{tmp_path}/new/llmserve-acme\n"
    assert "llmserve build --plugin acme --model demo" in done.stderr


def test_every_role_can_be_asked_for() -> None:
    from llmserve.roles import ROLES as ALL

    assert set(ROLES) == set(ALL) - {"backend", "frontend"}
    assert f"[{'|'.join(KINDS)}]" in CliRunner().invoke(cli, ["plugin", "new", "--help"]).stdout


def test_a_command_comes_without_a_recipe_and_its_tests_pass(tmp_path: Path) -> None:
    folder = new_package("acme-count", "command", tmp_path)
    found = files(folder)
    assert not [path for path, text in found.items() if "scaffold" in (path + text).lower()]
    assert not any("conformance" in path for path in found)
    assert "llmserve acme-count --help" in found["README.md"]
    assert "build --plugin" not in found["README.md"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
    words = ["plugin", "new", "acme-sum", "--role", "command", "--output", str(tmp_path)]
    assert "llmserve acme-sum --help" in CliRunner().invoke(cli, words).stderr
