"""Entry points are found where importlib.metadata finds them."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from llmserve.installed import entry_points


def distribution(folder: Path, name: str, entries: str, kind: str = "dist-info") -> None:
    home = folder / f"{name.replace('-', '_')}-1.2.{kind}"
    home.mkdir(parents=True)
    file = "METADATA" if kind == "dist-info" else "PKG-INFO"
    (home / file).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n\nVersion: 9\n")
    (home / "entry_points.txt").write_text(entries)


@pytest.mark.parametrize("group", ["llmserve.api1", "console_scripts", "pytest11"])
def test_the_same_are_found_as_by_the_standard_library(group: str) -> None:
    ours = {(p.name, p.value, p.distribution, p.version) for p in entry_points(group)}
    theirs = {
        (p.name, p.value.partition("[")[0].strip(), p.dist.name, p.dist.version)
        for p in metadata.entry_points(group=group)
        if p.dist
    }
    assert ours == theirs
    assert ours


def test_files_are_read_as_the_specification_lays_them_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = "[other]\na = x\n\n# a comment\n[llmserve]\nacme = acme_llmserve [extra]\nb=c.d\n"
    distribution(tmp_path / "one", "acme-llmserve", entries)
    distribution(tmp_path / "one", "old", "[llmserve]\nold = old\n", kind="egg-info")
    distribution(tmp_path / "two", "Acme-LLMserve", "[llmserve]\nshadowed = x\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "one"), str(tmp_path / "two"), "/gone"])
    found = [(p.name, p.value, p.distribution, p.version) for p in entry_points("llmserve")]
    assert found == [
        ("acme", "acme_llmserve", "acme-llmserve", "1.2"),
        ("b", "c.d", "acme-llmserve", "1.2"),
        ("old", "old", "old", "1.2"),
    ]


def test_a_file_that_is_not_utf_8_hides_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "c"):
        distribution(tmp_path, name, f"[llmserve]\n{name} = {name}\n")
    distribution(tmp_path, "b", "")
    (tmp_path / "b-1.2.dist-info" / "entry_points.txt").write_bytes(b"[other]\n\xff = x\n")
    (tmp_path / "c-1.2.dist-info" / "METADATA").write_bytes(b"Name: c\nAuthor: J\xf6rg\n\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = [(p.name, p.distribution) for p in entry_points("llmserve")]
    assert found == [("a", "a"), ("c", "c")]
