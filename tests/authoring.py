"""The examples of the page for plugin authors, taken out of it and installed as a package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[1] / "plugins" / "README.md"
_BLOCK = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^### (llmserve_\w+)\n(.*?)(?=^##)", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> dict[str, str]:
    """Return every example that has a file name."""
    found = _BLOCK.findall(text)
    names = [name for name, _ in found]
    assert len(set(names)) == len(names), "two examples have the same file name"
    return dict(found)


def sections() -> dict[str, str]:
    """Return what the page says of each hook."""
    return dict(_SECTION.findall(PAGE.read_text(encoding="utf-8")))


def install(folder: Path) -> Mapping[str, str]:
    """Put the examples where only processes with the returned environment find them."""
    site, tests = folder / "site", folder / "tests"
    papers = site / "llmserve_acme-0.1.0.dist-info"
    for made in (tests, papers):
        made.mkdir(parents=True)
    for name, text in blocks(PAGE.read_text(encoding="utf-8")).items():
        if name == "entry_points":
            entries = text.replace("[project.entry-points.", "[").replace('"', "")
            (papers / "entry_points.txt").write_text(entries, encoding="utf-8")
        else:
            home = tests if name.startswith("test_") else site
            (home / name).parent.mkdir(exist_ok=True)
            (home / name).write_text(text, encoding="utf-8")
    (papers / "METADATA").write_text("Metadata-Version: 2.1\nName: llmserve-acme\nVersion: 0.1.0\n")
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def run_tests(
    folder: Path, env: Mapping[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    """Run tests as the package's author would, in a process of their own."""
    options = ["-p", "llmserve.testing", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", *options, *words],
        cwd=folder, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
