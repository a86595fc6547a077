"""Makes the client that a model is emitted with: one file, which needs nothing of llmserve."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from llmserve.errors import PluginError

_PARTS = "llmserve.client.script_parts"


def client_script(module: str) -> str:
    """Return the source of a client; what it imports of the parts of ours stands in it.

    The module itself can be imported, checked and tested as it is.
    """
    source = _source(module)
    if _PARTS not in source:
        return source
    head, own = _divided(source)
    _, parts = _divided(_source(_PARTS))
    body = f"{parts.strip()}\n\n\n{own.strip()}\n"
    return "\n".join([head.rstrip(), "", *_imports(body, source, _source(_PARTS)), "", body])


def _source(module: str) -> str:
    spec = find_spec(module)
    if spec is None or not spec.origin:
        raise PluginError(f"the recipe's client {module} cannot be found")
    return Path(spec.origin).read_text(encoding="utf-8")


def _divided(source: str) -> tuple[str, str]:
    """Return what is before the imports of a module, and what is after them."""
    lines = source.splitlines(keepends=True)
    found = [n for n in ast.parse(source).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    return "".join(lines[: found[0].lineno - 1]), "".join(lines[found[-1].end_lineno :])


def _imports(body: str, *sources: str) -> list[str]:
    """Return the lines that import what the body uses, as ruff sorts them."""
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    found = {line for source in sources for line in _imported(source, used)}
    own: list[str] = []
    others: list[str] = []
    for _, name, line in sorted(found):
        (own if name.split(".")[0] in sys.stdlib_module_names else others).append(line)
    return ["from __future__ import annotations", "", *_joined(own), "", *others]


def _imported(source: str, used: set[str]) -> Iterator[tuple[bool, str, str]]:
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            of = node.module if isinstance(node, ast.ImportFrom) else None
            if of in ("__future__", _PARTS):
                continue
            for alias in node.names:
                if (alias.asname or alias.name) in used:
                    part = type(node)(**{**vars(node), "names": [alias]})
                    yield of is not None, of or alias.name, ast.unparse(part)


def _joined(lines: list[str]) -> list[str]:
    """Return the lines with one for each module: ``from typing import Any, NamedTuple``."""
    joined: dict[str, list[str]] = {}
    for line in lines:
        module, _, name = line.partition(" import ")
        joined.setdefault(module, []).append(name)
    return [f"{m} import {', '.join(names)}" if names[0] else m for m, names in joined.items()]
