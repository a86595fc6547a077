"""Which failures sources raise."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

_RAISES = {"RequestError", "Failure"}


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
