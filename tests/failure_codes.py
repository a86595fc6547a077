"""Our sources, and where they look into the words of an error."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def sources() -> list[Path]:
    paths = [path for top in ("llmserve", "cli", "plugins") for path in (ROOT / top).rglob("*.py")]
    return [path for path in sorted(paths) if "tests" not in path.relative_to(ROOT).parts]


def searches(code: str) -> Iterator[int]:
    """Yield the lines that compare or search the words of an error."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Compare):
            # Whether there are any words may be asked.
            if any(map(_is_words, [node.left, *node.comparators])):
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            in_words = node.func.attr in _TEXT_METHODS and _is_words(node.func.value)
            # Words without an argument are put into one line.
            searched = node.func.attr in _PATTERN_METHODS and any(map(_is_words, node.args))
            if searched or (in_words and node.args):
                yield node.lineno


_TEXT_METHODS = {
    "count", "endswith", "find", "index", "partition", "removeprefix", "removesuffix", "rfind",
    "rpartition", "rsplit", "split", "startswith",
}  # fmt: skip
_PATTERN_METHODS = {"findall", "finditer", "fullmatch", "match", "search", "split", "sub"}
_ERRORS = {"error", "failure", "exception", "exc", "caught", "reason", "e"}


def _is_words(node: ast.expr) -> bool:
    """Return whether an expression is what an error says."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("problem", "message", "words", "hint")
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name) and node.func.id in ("str", "repr"):
        return any(isinstance(a, ast.Name) and a.id in _ERRORS for a in node.args)
    return isinstance(node.func, ast.Attribute) and node.func.attr in ("message", "details")
