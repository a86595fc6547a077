"""The blocks of code and of commands on the pages that users read.

A block that cannot be run has a comment before it, which the site does not show:
``<!-- not run: why -->``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tests.site.pages import DOCS, ROOT

_WHY = re.compile(r"<!-- not run: (.+) -->")
_FENCE = re.compile(r'```(\w*)(?: title="([^"]+)")?')
PROGRAMS = {
    "llmserve", "pip", "python", "python3", "curl", "make", "docker", "cd", "pytest", "twine", ".",
}  # fmt: skip
PROMPT = "$ "
_GUIDES = "tests/live/test_guides.py"
RUN_BY = {
    "README.md": "tests/live/test_readme.py",
    "docs/guides/batches.md": _GUIDES,
    "docs/guides/fine-tuned.md": _GUIDES,
    "docs/guides/from-ollama.md": _GUIDES,
    "docs/guides/logprobs.md": _GUIDES,
    "docs/guides/openai.md": _GUIDES,
    "docs/guides/plugin.md": _GUIDES,
    "docs/guides/retrieval.md": _GUIDES,
    "docs/guides/sizing.md": "tests/unit/test_printed.py",
    "docs/guides/tools-json.md": _GUIDES,
    "docs/guides/tutorials.md": "tests/live/test_guide_sequences.py",
    "docs/plugins/embed.md": _GUIDES,
    "docs/plugins/gateway.md": _GUIDES,
    "docs/plugins/gpt2.md": "tests/live/test_guide_sequences.py",
    "docs/start/first.md": _GUIDES,
    "plugins/README.md": "tests/authoring.py",
}
"""Pages with code, or requests to a server, and what runs them."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    """That of a fence; an indented block has none."""
    title: str
    text: str
    why_not: str
    """Why it is not run, if the page says so."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """Return what is typed in it, each command on one line."""
        lines = self.text.splitlines()
        if any(line.startswith(PROMPT) for line in lines):
            return [each.removeprefix(PROMPT) for each in _whole(lines) if each.startswith(PROMPT)]
        if self.language or lines[0].split()[0] not in PROGRAMS:
            return []
        return [each for each in _whole(lines) if each.strip()]


def _whole(lines: Sequence[str]) -> Iterator[str]:
    """Join lines that a backslash or a quotation mark continues."""
    begun = ""
    for line in lines:
        begun += line.removesuffix("\\")
        if not line.endswith("\\") and _is_closed(begun):
            yield begun
            begun = ""
    assert not begun, begun


def _is_closed(line: str) -> bool:
    if not line.startswith((PROMPT, *PROGRAMS)):
        return True
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return False
    return True


def pages() -> list[Path]:
    return sorted(
        [
            *DOCS.rglob("*.md"),
            *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "RELEASING")),
            *ROOT.glob("plugins/**/README.md"),
        ]
    )


def all_blocks() -> Iterator[Block]:
    for path in pages():
        text = path.read_text(encoding="utf-8")
        yield from blocks(text, path.relative_to(ROOT).as_posix())


def blocks(text: str, page: str) -> Iterator[Block]:
    lines = [*text.splitlines(), ""]
    number, why = 0, ""
    while number < len(lines):
        line, before = lines[number], lines[number - 1] if number else ""
        if fence := _FENCE.match(line):
            body = list(takewhile(lambda line: line != "```", lines[number + 1 :]))
            yield Block(page, number + 1, fence[1], fence[2] or "", _joined(body), why)
            number, why = number + len(body) + 1, ""
        elif line.startswith("    ") and not before.strip():
            body = [line[4:] for line in takewhile(_is_indented, lines[number:])]
            yield Block(page, number + 1, "", "", _joined(body), why)
            number, why = number + len(body) - 1, ""
        elif line.strip():
            why = found[1] if (found := _WHY.fullmatch(line)) else ""
        number += 1


def _is_indented(line: str) -> bool:
    return line.startswith("    ") or not line


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(lines).strip("\n")
