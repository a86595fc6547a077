"""A third-party package, installed for real: listed, built, served and queried."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from llmserve.testing.command import run
from tests.support import ROOT, with_path

pytestmark = pytest.mark.long

ACME = ROOT / "tests" / "acme_words"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Install Acme's wheel, with its entry point, where only processes of this module find it."""
    site = tmp_path_factory.mktemp("acme") / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(ACME)], check=True)
    return with_path(site)


def test_it_is_listed_and_blocked_by_its_name(installed: Mapping[str, str]) -> None:
    listed = json.loads(run("plugins", "--json", env=installed).stdout)
    ours = [part for part in listed["components"] if part["origin"] == "acme-llmserve"]
    assert {(part["role"], part["name"]) for part in ours} == {
        ("recipe", "acme"),
        ("recipe", "acme-echo"),
        ("tokenizer", "acme-bpe"),
        ("generator", "acme-echo"),
        ("batching", "acme-alone"),
    }
    assert {part["version"] for part in ours} == {"0.3.0"}
    assert not listed["problems"]
    listed = json.loads(
        run("plugins", "--json", env=installed, LLMSERVE_BLOCK_PLUGINS="acme").stdout
    )
    assert "acme" not in {part["name"] for part in listed["components"]}
    (problem,) = listed["problems"]
    assert "acme-llmserve 0.3.0" in problem


def test_it_adds_a_command(installed: Mapping[str, str]) -> None:
    assert run("acme-hello", env=installed).stdout == "hello from acme\n"
    assert "Say hello from Acme (acme)" in run("--help", env=installed).stdout


@pytest.mark.parametrize(
    ("args", "settings"),
    [
        (["--plugin", "acme", "--set", "acme_lowercase=true"], {"lowercase": True, "path": "acme"}),
        # One component of another recipe is replaced.
        (["--plugin", "hf", "--tokenizer", "acme-bpe"], {"lowercase": False, "path": "acme"}),
    ],
)
def test_it_is_built_with_its_own_option(
    installed: Mapping[str, str], tmp_path: Path, args: list[str], settings: dict[str, object]
) -> None:
    done = run("build", "--model", "demo", "--output", str(tmp_path), *args, env=installed)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "demo" / "llmserve.json").read_text())
    assert manifest["components"]["tokenizer"]["name"] == "acme-bpe"
    assert manifest["components"]["tokenizer"]["settings"] == settings
    assert manifest["packages"]["acme-llmserve"] == "0.3.0"
    assert manifest["options"]["max_batch_size"] == (4 if "acme" in args else 8)


def test_it_passes_the_suite_that_every_recipe_must_pass(
    installed: Mapping[str, str], tmp_path: Path
) -> None:
    """As its author would run it: one class, in a test of the package."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "llmserve.testing"]
    done = subprocess.run(
        [*command, str(ACME / "suite.py")],
        env=installed,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
