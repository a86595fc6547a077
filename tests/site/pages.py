"""The pages of the site that lie elsewhere in the repository, and where links to files lead."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.site import generated

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDE = ROOT / "plugins" / "README.md"
MOVED = {
    "security.md": ROOT / "SECURITY.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
} | {
    f"plugins/{page.parent.name}.md": page
    for page in sorted(ROOT.glob("plugins/examples/**/README.md"))
}
_FENCE = re.compile(r"(?ms)^```.*?^```$")
_HEADING = re.compile(r"(?m)^#{2,3} (.+)$")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


@cache
def guide() -> Mapping[str, tuple[str, str]]:
    """The guide for authors of plugins, a page for each hook and section: its title and text."""
    text = GUIDE.read_text(encoding="utf-8")
    code = [match.span() for match in _FENCE.finditer(text)]
    starts = [
        match
        for match in _HEADING.finditer(text)
        if not any(start <= match.start() < end for start, end in code)
    ]
    ends = [*(match.start() for match in starts[1:]), len(text)]
    pages = {"write/index.md": ("Ten minutes", text[: starts[0].start()])}
    for match, end in zip(starts, ends, strict=True):
        body = re.sub(r"(?m)^###(#*) ", r"#\1 ", text[match.start() : end])
        pages[f"write/{slug(match[1])}.md"] = (_title(match[1]), re.sub(r"\A##? ", "# ", body))
    return pages


def slug(title: str) -> str:
    """As MkDocs makes the anchor of a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def _title(heading: str) -> str:
    words = heading.removeprefix("llmserve_register_").removeprefix("llmserve_").replace("_", " ")
    return words.capitalize() if words != heading else heading


@cache
def all_pages() -> Mapping[str, str]:
    moved = {
        path: with_links(source.read_text(encoding="utf-8"), source, path)
        for path, source in MOVED.items()
    }
    cut = {path: with_links(text, GUIDE, path) for path, (_, text) in guide().items()}
    return {**moved, **cut, **{path: make() for path, make in generated.PAGES.items()}}


def navigation() -> Mapping[str, list[Any]]:
    examples = [path for path in MOVED if path.startswith("plugins/")]
    return {
        "Write a plugin": [
            *({title: path} for path, (title, _) in guide().items()),
            {"Examples": [{Path(path).stem: path} for path in examples]},
        ],
        "Python": [
            "reference/python.md",
            *({Path(path).stem: path} for path in generated.PAGES if "/python/" in path),
        ],
    }


def weight(path: str) -> float:
    """How much a search prefers a page: who asks it a question wants a guide before a reference.

    Long pages have nearly every word, so that without this they would come first.
    """
    folder = path.partition("/")[0]
    if path in MOVED or path.startswith("reference/python/"):
        return 0.2
    return {"start": 2.0, "guides": 2.0, "benchmarks.md": 0.3, "concepts": 0.3}.get(folder, 1.0)


def with_links(text: str, source: Path, page: str) -> str:
    """Lead links from ``source``, a file of the repository, to pages of the site.

    A link to a file that has no page becomes its words.
    """
    code = [match.span() for match in _FENCE.finditer(text)]

    def replaced(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        if "://" in target or any(start <= match.start() < end for start, end in code):
            return match[0]
        found = _page_of(target, source)
        if found is None:
            return words
        path, _, anchor = found.partition("#")
        relative = posixpath.relpath(path, posixpath.dirname(page))
        return f"{image}[{words}]({relative}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(replaced, text)


def _page_of(target: str, source: Path) -> str | None:
    name, _, anchor = target.partition("#")
    path = Path(os.path.normpath(source.parent / name)) if name else source
    if path.is_dir() and (path / "README.md").is_file():
        path /= "README.md"
    if path == GUIDE:
        return _in_guide(anchor)
    suffix = f"#{anchor}" if anchor else ""
    pages = {file: page for page, file in MOVED.items()}
    if path in pages:
        return pages[path] + suffix
    if path.is_relative_to(DOCS) and (path.exists() or _is_generated(path)):
        return path.relative_to(DOCS).as_posix() + suffix
    return "index.md" if path == ROOT / "README.md" else None


def _is_generated(path: Path) -> bool:
    uri = path.relative_to(DOCS).as_posix()
    return uri in generated.PAGES or uri in MOVED or uri in guide()


def _in_guide(anchor: str) -> str:
    if not anchor:
        return "write/index.md"
    if f"write/{anchor}.md" in guide():
        return f"write/{anchor}.md"
    holder = next(
        path
        for path, (_, text) in guide().items()
        if anchor in map(slug, re.findall(r"(?m)^#+ (.+)$", text))
    )
    return f"{holder}#{anchor}"
