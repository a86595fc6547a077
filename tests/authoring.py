"""The examples of the page for plugin authors, taken out of it and installed as a package."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import ROOT, install

PAGE = ROOT / "plugins" / "README.md"
_BLOCK = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks(text: str) -> dict[str, str]:
    """Return every example that has a file name; those of one name make one file."""
    found: dict[str, str] = {}
    for name, part in _BLOCK.findall(text):
        found[name] = f"{found[name]}\n\n{part}" if name in found else part
    return found


def install_examples(folder: Path) -> Path:
    """Put the examples into a folder, their tests apart; return where Python is to look."""
    site, tests = folder / "site", folder / "tests"
    tests.mkdir(parents=True)
    found = blocks(PAGE.read_text(encoding="utf-8"))
    entries = found.pop("entry_points").replace("[project.entry-points.", "[").replace('"', "")
    install(site, "llmserve-acme", entries, version="0.1.0")
    for name, text in found.items():
        home = tests if name.startswith("test_") else site
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(text, encoding="utf-8")
    return site
