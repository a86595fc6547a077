"""A third party's package, installed for real: listed, built, served and asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ACME = Path(__file__).parents[1] / "acme_words"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Install Acme's wheel where only this module's processes look, with its entry point."""
    folder = tmp_path_factory.mktemp("acme")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(ACME)], check=True)
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def llmserve(*words: str, env: Mapping[str, str]) -> str:
    command = [sys.executable, "-m", "llmserve_cli", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_listed_with_where_it_comes_from(installed: Mapping[str, str]) -> None:
    listed = json.loads(llmserve("plugins", "--json", env=installed))
    ours = {(c["role"], c["name"]) for c in listed["components"] if c["origin"] == "acme-llmserve"}
    assert ours == {
        ("recipe", "acme"),
        ("recipe", "acme-echo"),
        ("tokenizer", "acme-bpe"),
        ("generator", "acme-echo"),
        ("batching", "acme-alone"),
    }
    assert {c["version"] for c in listed["components"] if c["plugin"] == "acme"} == {"0.3.0"}
    assert not listed["problems"]


def test_blocking_it_keeps_it_out(installed: Mapping[str, str]) -> None:
    listed = json.loads(
        llmserve("plugins", "--json", env={**installed, "LLMSERVE_BLOCK_PLUGINS": "acme"})
    )
    assert "acme" not in {c["name"] for c in listed["components"]}
    (problem,) = listed["problems"]
    assert "acme-llmserve 0.3.0" in problem


def test_it_adds_a_command(installed: Mapping[str, str]) -> None:
    assert llmserve("acme-hello", env=installed) == "hello from acme\n"
    assert "Say hello from Acme (acme)" in llmserve("--help", env=installed)


def test_its_recipe_is_built_with_its_own_option(
    installed: Mapping[str, str], tmp_path: Path
) -> None:
    llmserve(
        "build", "--plugin", "acme", "--model", "demo", "--output", str(tmp_path / "repo"),
        "--set", "acme_lowercase=true", env=installed,
    )  # fmt: skip
    manifest = json.loads((tmp_path / "repo" / "demo" / "llmserve.json").read_text())
    assert manifest["components"]["tokenizer"]["settings"] == {"lowercase": True, "path": "acme"}
    assert manifest["packages"]["acme-llmserve"] == "0.3.0"
    assert manifest["options"]["max_batch_size"] == 4


def test_it_replaces_one_cell_of_another_recipe(
    installed: Mapping[str, str], tmp_path: Path
) -> None:
    llmserve(
        "build", "--plugin", "hf", "--tokenizer", "acme-bpe", "--model", "demo",
        "--output", str(tmp_path / "repo"), env=installed,
    )  # fmt: skip
    manifest = json.loads((tmp_path / "repo" / "demo" / "llmserve.json").read_text())
    assert manifest["components"]["tokenizer"]["name"] == "acme-bpe"


def test_it_passes_the_suite_that_every_recipe_has_to_pass(
    installed: Mapping[str, str], tmp_path: Path
) -> None:
    """As its author would: by one class, in a test of the package's own."""
    suite = str(ACME / "suite.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "llmserve.testing", suite]
    done = subprocess.run(
        command, env=installed, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
