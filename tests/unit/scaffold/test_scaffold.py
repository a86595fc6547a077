"""`llmserve plugin new` writes complete packages under any valid name and overwrites nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from llmserve import __version__
from llmserve.errors import LLMServeError, OutputError, UsageError
from llmserve.plugins.api import API
from llmserve.plugins.roles import ROLES as ALL_ROLES
from llmserve.scaffold import KINDS, ROLES, new_package
from llmserve.scaffold.generate import Names
from llmserve_cli.group import cli
from tests.support import files_of, install, with_path


@pytest.mark.parametrize("name", ["x", "acme-words", "a-name-of-thirty-two-letters-abc"])
def test_packages_are_complete_and_pass_their_own_linters(tmp_path: Path, name: str) -> None:
    slug = name.replace("-", "_")
    package = f"llmserve_{slug}"
    for role, mode in (
        *((kind, "batch") for kind in KINDS),
        ("generator", "step"),
        ("generator", "runner"),
    ):
        output = tmp_path / f"{role}-{mode}"
        folder = new_package(name, role, output, mode=mode)
        files = files_of(folder)
        expected = {".gitignore", "README.md", f"{package}/__init__.py", f"{package}/py.typed"}
        assert expected <= files.keys()
        conformance = f"tests/test_{slug}_conformance.py"
        assert (conformance in files) == (role != "command")
        assert not [path for path, text in files.items() if "scaffold" in (path + text).lower()]
        project = files["pyproject.toml"]
        assert f'[project.entry-points."llmserve.api{API}"]\n{name} = "{package}"' in project
        # It requires the llmserve that generated it.
        required = [Requirement(text) for text in re.findall(r'(?m)^    "(.+)",$', project)]
        (llmserve,) = [needed.specifier for needed in required if needed.name == "llmserve"]
        assert __version__ in llmserve
        assert "99.0" not in llmserve
        assert list(output.iterdir()) == [folder]
    for command in (["check"], ["format", "--check"]):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout


INVALID = ["", "Acme", "1acme", "acme_words", "acme--words", "-acme", "acme-", "a.b", "a/b", ".."]


@pytest.mark.parametrize(
    ("name", "role", "message"),
    [
        *((name, "recipe", "as in acme-words") for name in INVALID),
        *((name, "recipe", "as in acme-words") for name in ("a" * 33, "é", "acme words", "acme\n")),
        ("llmserve-acme", "recipe", "leave out llmserve"),
        ("hf", "tokenizer", "the name 'hf' is taken: .*it is plugin 'hf'"),
        ("core", "recipe", "the name 'core' is taken: .*it is plugin 'core'"),
        ("dynamic", "batching", "is taken: .*'core' .* has a batching of that name"),
        ("text", "formatter", "is taken: .*'core' .* has a formatter of that name"),
        ("cli", "recipe", "is taken: .*llmserve-cli is installed here"),
    ],
)
def test_a_name_that_a_package_cannot_have_is_refused(
    tmp_path: Path, name: str, role: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
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
    with pytest.raises(OutputError, match="already exists"):
        new_package("acme", "recipe", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["llmserve-acme"]
    (tmp_path / "file").touch()
    with pytest.raises(LLMServeError, match="cannot be written to"):
        new_package("acme", "recipe", tmp_path / "file")


def test_names_that_contain_a_role_are_not_doubled() -> None:
    text = "ScaffoldTokenizer"
    assert Names("acme-tokenizer").replaced(text, "tokenizer") == "AcmeTokenizer"
    assert Names("acme").replaced(text, "tokenizer") == "AcmeTokenizer"
    assert Names("tokenizer").replaced(text, "tokenizer") == "TokenizerTokenizer"


def test_every_role_of_a_model_has_a_scaffold() -> None:
    assert set(ROLES) == set(ALL_ROLES) - {"backend", "frontend", "tool_parser"}


@pytest.mark.parametrize("role", KINDS)
def test_the_command_prints_the_folder_and_the_next_step(tmp_path: Path, role: str) -> None:
    words = ["plugin", "new", "acme-count", "--role", role, "--output", str(tmp_path / "new")]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "new" / "llmserve-acme-count"
    assert result.stdout == f"{folder}\n"
    if role in ROLES:
        assert "llmserve build --plugin acme-count --model demo" in result.stderr
        return
    # These packages have no recipe, and their tests pass unchanged.
    readme = (folder / "README.md").read_text(encoding="utf-8")
    run = {"command": "llmserve acme-count --help", "frontend": "serve --frontend acme-count"}
    assert run[role] in result.stderr
    assert run[role] in readme
    assert "build --plugin" not in readme
    entry = f"[llmserve.api{API}]\nacme-count = llmserve_acme_count\n"
    install(folder, "llmserve-acme-count", entry)
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=folder, env=with_path(folder), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert tests.returncode == 0, tests.stdout
    assert f"{4 if role == 'command' else 10} passed" in tests.stdout


def test_only_a_generator_has_a_mode(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a recipe has no mode"):
        new_package("acme", "recipe", tmp_path, mode="step")
