"""The command, run as a user runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import llmserve
from llmserve.plugin import demo_model_path
from llmserve.testing import run

WEIGHTS = demo_model_path() / "model.safetensors"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its weights, one that refers to them, and one that llmserve did not build."""
    root = tmp_path_factory.mktemp("sizes")
    shutil.copytree(demo_model_path(), root / "model")
    llmserve.build("hf", "demo", output=root / "repo")
    llmserve.build("hf", str(root / "model"), output=root / "repo", weights="reference")
    (root / "repo" / "other" / "1").mkdir(parents=True)
    (root / "repo" / "other" / "1" / "model.onnx").write_bytes(b"x" * 12_345)
    return root / "repo"


def sizes(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("sizes", *arguments)


def test_sizes_are_those_of_the_files(repository: Path) -> None:
    result = sizes(str(repository), "--json")
    assert result.returncode == 0, result.stderr
    demo, model, other = json.loads(result.stdout)
    command = ["find", str(repository / "demo"), "-type", "f", "-printf", "%s\n"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert demo["bytes"] == sum(map(int, output.split())) > WEIGHTS.stat().st_size
    assert (demo["recipe"], demo["weights"]) == ("hf", "here")
    assert {"llmserve", "llmserve-hf", "torch"} <= demo["packages"].keys()
    assert model["bytes"] < WEIGHTS.stat().st_size
    assert model["weights"] == str(repository.parent / "model")
    assert (other["bytes"], other["recipe"], other["packages"]) == (12_345, "-", {})


def test_the_table_has_a_line_per_model_and_their_total(repository: Path) -> None:
    lines = sizes(str(repository)).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["MODEL", "demo", "model", "other", "total"]
    assert "12.3 kB" in lines[3]
    assert " MB" in lines[4]


def test_a_damaged_manifest_is_reported_and_the_rest_is_listed(
    repository: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(repository, tmp_path / "repo")
    (copy / "demo" / "llmserve.json").write_text("{")
    result = sizes(str(copy))
    assert result.returncode == 0
    assert "demo: " in result.stderr
    assert "build the model again" in result.stderr
    assert "other" in result.stdout


def test_a_missing_repository_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    result = sizes(str(folder))
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr == f"llmserve: no folder at {folder}: name a model repository\n"


def test_the_help_lists_it_with_our_own_commands() -> None:
    assert "Print the sizes of a repository's models" in run("--help").stdout
