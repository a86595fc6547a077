"""A model of a third party's plugin where that plugin is missing, changed or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import llmserve
from llmserve.repository.check import check_repository
from tests.authoring import install


@pytest.fixture
def env(tmp_path: Path) -> Mapping[str, str]:
    return install(tmp_path)


@pytest.fixture
def repository(tmp_path: Path, env: Mapping[str, str]) -> Path:
    repository = tmp_path / "repo"
    done = run("build", "--plugin", "acme", "--model", "demo", "--output", str(repository), env=env)
    assert done.returncode == 0, done.stderr
    return repository


def run(*words: str, env: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmserve_cli", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def papers(tmp_path: Path) -> Path:
    return tmp_path / "site" / "llmserve_acme-0.1.0.dist-info" / "METADATA"


def test_the_manifest_and_the_dockerfile_name_the_plugins_package(repository: Path) -> None:
    manifest = json.loads((repository / "demo" / "llmserve.json").read_text())
    assert manifest["packages"]["llmserve-acme"] == "0.1.0"
    assert "numpy" in manifest["packages"]
    assert "llmserve-acme==0.1.0" in (repository / "Dockerfile").read_text()


def test_serve_names_what_is_missing_and_starts_nothing(repository: Path) -> None:
    done = run("serve", str(repository), "--runtime", "embedded", "--http-port", "0")
    assert done.returncode == 3
    lines = done.stderr.splitlines()
    assert lines[-1] == (
        "llmserve: demo: it needs llmserve-acme, which is not installed here: "
        "pip install llmserve-acme==0.1.0, or serve it from its container"
    )
    assert any("its tokenizer 'acme-bytes' cannot be run" in line for line in lines)
    assert "Triton" not in done.stderr


def test_serve_asks_only_for_what_it_is_to_load(repository: Path) -> None:
    llmserve.build("hf", "demo", name="other", output=repository)
    assert not check_repository(repository, models=["other"], quick=True)
    told = check_repository(repository, models=["demo"], quick=True)
    assert told == check_repository(repository, quick=True)
    assert len(told) > 1


def test_check_names_what_is_missing(repository: Path) -> None:
    done = run("check", str(repository))
    assert done.returncode == 3
    assert "demo: it needs llmserve-acme, which is not installed here" in done.stdout


def test_check_names_what_is_of_another_version(
    repository: Path, tmp_path: Path, env: Mapping[str, str]
) -> None:
    papers(tmp_path).write_text("Name: llmserve-acme\nVersion: 0.2.0\n")
    done = run("check", str(repository), env=env)
    assert done.returncode == 0
    assert done.stdout == (
        "note: demo: it was built with llmserve-acme 0.1.0, and 0.2.0 is installed here: "
        "build it again\n"
    )


def test_serve_names_what_is_of_another_version_before_anything_else(
    repository: Path, tmp_path: Path, env: Mapping[str, str]
) -> None:
    papers(tmp_path).write_text("Name: llmserve-acme\nVersion: 0.2.0\n")
    # A port that is taken ends it before a server is started.
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = ["--runtime", "embedded", "--http-port", port, "--frontend", "none"]
        done = run("serve", str(repository), *words, env=env)
    note, problem = done.stderr.splitlines()[0], done.stderr.splitlines()[-1]
    assert note == (
        "llmserve: note: demo: it was built with llmserve-acme 0.1.0, and 0.2.0 is installed here: "
        "build it again"
    )
    assert port in problem


def test_a_blocked_plugin_cannot_be_built_with_and_says_so(
    tmp_path: Path, env: Mapping[str, str]
) -> None:
    words = ["build", "--plugin", "acme", "--model", "demo", "--output", str(tmp_path / "other")]
    done = run(*words, env={**env, "LLMSERVE_BLOCK_PLUGINS": "llmserve-acme:acme"})
    assert done.returncode == 3
    why = "cannot be used: LLMSERVE_BLOCK_PLUGINS names it"
    assert done.stderr == f"llmserve: plugin 'acme' (llmserve-acme 0.1.0) {why}\n"
