"""What `llmserve plugin new` writes, installed and run as it is: tested, built, served, asked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llmserve.scaffold import ROLES, new_package

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Installed:
    """All five packages in a folder of their own, and the path on which they are found."""

    folder: Path
    env: Mapping[str, str]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *words],
            cwd=self.folder, env=self.env, capture_output=True, text=True, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("scaffold")
    made = [new_package(f"new-{role}", role, folder) for role in ROLES]
    pip = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
    found = Installed(folder, {**os.environ, "PYTHONPATH": path})
    done = found.run(*pip, "--target", str(folder / "site"), *map(str, made))
    assert done.returncode == 0, done.stderr
    return found


@pytest.fixture(scope="module")
def results(installed: Installed) -> Mapping[str, list[str]]:
    """Run the tests of all packages in one process, so that they share one server."""
    tests = [f"llmserve-new-{role}/tests" for role in ROLES]
    options = ["-q", "-p", "llmserve.testing", "-p", "no:cacheprovider", "--rootdir", "."]
    done = installed.run("pytest", *options, "--junitxml", "results.xml", *tests)
    assert done.returncode in (0, 1), done.stdout
    found: dict[str, list[str]] = {role: [] for role in ROLES}
    for case in ElementTree.parse(installed.folder / "results.xml").iter("testcase"):
        role = next(r for r in ROLES if f"test_new_{r}" in str(case.get("classname")))
        problem = next((child for child in case if child.tag in ("failure", "error")), None)
        told = "" if problem is None else f": {problem.get('message')}\n{problem.text}"
        found[role].append(f"{case.get('classname')}.{case.get('name')}{told}")
    return found


@pytest.mark.parametrize("role", ROLES)
def test_its_tests_pass_with_a_real_triton(results: Mapping[str, list[str]], role: str) -> None:
    assert not [told for told in results[role] if ": " in told]
    conformance = [told for told in results[role] if "_conformance.TestNew." in told]
    assert len(conformance) > 15
    assert len(results[role]) > len(conformance)


@pytest.mark.parametrize("role", ROLES)
def test_it_is_listed_and_built_by_its_name(installed: Installed, role: str) -> None:
    name = f"new-{role}"
    listed = installed.run("llmserve_cli", "plugins", name)
    assert listed.returncode == 0, listed.stderr
    assert any(line.split() == [role, name] for line in listed.stdout.splitlines()) or (
        role == "recipe"
    )
    output = f"{role}/model_repository"
    words = ["build", "--plugin", name, "--model", "demo", "--output", output]
    built = installed.run("llmserve_cli", *words)
    assert built.returncode == 0, built.stderr
    checked = installed.run("llmserve_cli", "check", output)
    assert (checked.returncode, checked.stdout) == (0, "")
