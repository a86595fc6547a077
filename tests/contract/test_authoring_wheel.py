"""The core as it is installed from an index: what `llmserve plugin new` copies is in the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmserve.scaffold import ROLES, new_package

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("wheel") / "site"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", *options, str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return site


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("role", ROLES)
def test_an_installed_llmserve_writes_the_same_package(
    site: Path, tmp_path: Path, role: str
) -> None:
    code = (
        "import llmserve, sys\n"
        "from llmserve_cli.main import main\n"
        f"assert llmserve.__file__.startswith({str(site)!r})\n"
        "main(sys.argv[1:])"
    )
    words = ["plugin", "new", "acme", "--role", role, "--output", str(tmp_path / "installed")]
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    here = new_package("acme", role, tmp_path / "here")
    assert files(tmp_path / "installed" / "llmserve-acme") == files(here)


def test_the_list_of_what_is_public_is_installed(site: Path) -> None:
    listed = (site / "llmserve" / "api.txt").read_text(encoding="utf-8")
    assert listed == (ROOT / "llmserve" / "api.txt").read_text(encoding="utf-8")
