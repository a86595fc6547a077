"""Which failures sources raise."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from llmserve.plugins.api import CURRENT

_RAISES = {"RequestError", "Failure"}


def installed_sources() -> Iterator[Path]:
    """Return the sources of llmserve and of all its plugins that are installed."""
    for module in sorted({"llmserve", *(e.module for e in entry_points(group=CURRENT))}):
        if (spec := find_spec(module)) and spec.origin:
            yield from Path(spec.origin).parent.rglob("*.py")


def raised_codes(paths: Iterable[Path]) -> set[str]:
    """Return the codes that these files raise."""
    codes = {"invalid_request", "model_failed"}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                values = [word.value for word in node.keywords if word.arg == "code"]
                if node.func.id in _RAISES:
                    codes |= {str(v.value) for v in values if isinstance(v, ast.Constant)}
    return codes
