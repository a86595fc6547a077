"""One version: llmserve's, that of the packages in this repository, and of the changelog's head."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from llmserve import __version__

ROOT = Path(__file__).parents[2]
PROJECTS = sorted(
    [*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("plugins/examples/*/py*.toml")]
)
OURS = Version(__version__)


def test_the_changelog_begins_with_the_version() -> None:
    head = re.search(r"(?m)^## (\S+)(.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert head is not None
    assert head[1] == OURS.base_version
    # What is not released yet sorts before the release, so that the release is an upgrade.
    assert (head[2] == " (unreleased)") == OURS.is_devrelease


def test_the_readme_says_what_make_demo_installs_and_how_to_add_the_rest() -> None:
    requirements = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    installed = re.findall(r"(?m)^-e plugins/([\w-]+)(?:\[\w+\])?$", requirements)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sentence = re.search(r"`make demo` installs the command with (.*) in `\.venv/bin`", readme)
    assert sentence is not None
    assert re.split(r", | and the ", sentence[1].replace("`", "")) == installed
    added = re.search(r"`pip install (-c constraints\.txt (?:-e \S+ ?)+)`", readme)
    assert added is not None
    for folder in re.findall(r"-e (\S+)", added[1]):
        assert (ROOT / folder / "pyproject.toml").is_file()
        assert folder.removeprefix("plugins/") not in installed


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: str(path.parent.name))
def test_a_package_has_our_version_and_requires_it(project: Path) -> None:
    text = project.read_text(encoding="utf-8")
    assert re.findall(r'(?m)^version = "(.+)"$', text) == [__version__]
    required = [Requirement(found) for found in re.findall(r'"(llmserve[^"]*[<>=][^"]*)"', text)]
    assert "llmserve" in {requirement.name for requirement in required}
    major, minor = OURS.release[:2]
    for requirement in required:
        # The versions before and after this one may have another API.
        versions = (
            f"{major}.{minor - 1}.9",
            __version__,
            f"{major}.{minor}.9",
            f"{major}.{minor + 1}.0",
        )
        fits = [requirement.specifier.contains(v, prereleases=True) for v in versions]
        assert fits == [False, True, True, False], str(requirement)
