"""The command, as a user runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import llmserve
from llmserve.testing import demo_model_path
from tests.support import run

WEIGHTS = demo_model_path() / "model.safetensors"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model that holds its weights, one that refers to them, one of somebody else."""
    home = tmp_path_factory.mktemp("sizes")
    shutil.copytree(demo_model_path(), home / "model")
    llmserve.build("hf", "demo", output=home / "repo")
    llmserve.build("hf", str(home / "model"), output=home / "repo", weights="reference")
    (home / "repo" / "other" / "1").mkdir(parents=True)
    (home / "repo" / "other" / "1" / "model.onnx").write_bytes(b"x" * 12_345)
    return home / "repo"


def sizes(*words: str) -> subprocess.CompletedProcess[str]:
    return run("sizes", *words)


def test_sizes_are_those_of_the_files(repository: Path) -> None:
    done = sizes(str(repository), "--json")
    assert done.returncode == 0, done.stderr
    demo, model, other = json.loads(done.stdout)
    found = ["find", str(repository / "demo"), "-type", "f", "-printf", "%s\n"]
    output = subprocess.run(found, capture_output=True, text=True, check=True).stdout
    assert demo["bytes"] == sum(map(int, output.split())) > WEIGHTS.stat().st_size
    assert (demo["recipe"], demo["weights"]) == ("hf", "here")
    assert {"llmserve", "llmserve-hf", "torch"} <= demo["packages"].keys()
    assert model["bytes"] < WEIGHTS.stat().st_size
    assert model["weights"] == str(repository.parent / "model")
    assert (other["bytes"], other["recipe"], other["packages"]) == (12_345, "-", {})


def test_the_table_has_a_line_for_each_and_their_sum(repository: Path) -> None:
    lines = sizes(str(repository)).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["MODEL", "demo", "model", "other", "together"]
    assert "12.3 kB" in lines[3]
    assert " MB" in lines[4]


def test_a_damaged_manifest_is_reported_and_the_rest_is_listed(
    repository: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(repository, tmp_path / "repo")
    (copy / "demo" / "llmserve.json").write_text("{")
    done = sizes(str(copy))
    assert done.returncode == 0
    assert "demo: " in done.stderr
    assert "build the model again" in done.stderr
    assert "other" in done.stdout


def test_what_is_no_repository_is_one_line(tmp_path: Path) -> None:
    done = sizes(str(tmp_path / "nowhere"))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        f"llmserve: no folder at {tmp_path / 'nowhere'}: name a model repository\n"
    )


def test_it_stands_in_the_help_with_our_own_commands() -> None:
    assert "Say how large the models of a repository are" in run("--help").stdout
