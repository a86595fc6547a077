"""The examples of ``plugins/README.md``, extracted and installed as a package."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import ROOT, install

PAGE = ROOT / "plugins" / "README.md"
_BLOCK = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks(text: str) -> dict[str, str]:
    """Return every example that has a file name; blocks with the same name are joined."""
    files: dict[str, str] = {}
    for name, part in _BLOCK.findall(text):
        files[name] = f"{files[name]}\n\n{part}" if name in files else part
    return files


def install_examples(folder: Path) -> Path:
    """Install the examples into a folder, their tests separately; return the site directory."""
    site, tests = folder / "site", folder / "tests"
    tests.mkdir(parents=True)
    files = blocks(PAGE.read_text(encoding="utf-8"))
    entries = files.pop("entry_points").replace("[project.entry-points.", "[").replace('"', "")
    install(site, "llmserve-acme", entries, version="0.1.0")
    for name, text in files.items():
        path = (tests if name.startswith("test_") else site) / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return site
