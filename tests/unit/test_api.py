"""What is public: listed, numbered, and all that plugins use of the core."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from llmserve import apilisting
from llmserve.api import API, MODULES
from llmserve.apilisting import listing, public_names

ROOT = Path(__file__).parents[2]
LISTED = ROOT / "llmserve" / "api.txt"
MEND = "python -m llmserve.apilisting > llmserve/api.txt"
PLUGINS = [
    path
    for pattern in ("plugins/**/*.py", "tests/acme_words/**/*.py", "llmserve/scaffold/*/**/*.py")
    for path in sorted(ROOT.glob(pattern))
    # What tests and measures our own plugins may look behind the curtain; examples may not.
    if path.relative_to(ROOT).parts[2] not in ("bench", "tests")
]


def test_nothing_public_has_gone_or_changed_under_the_same_number() -> None:
    written = LISTED.read_text(encoding="utf-8").splitlines()
    gone = sorted(set(written) - set(listing()))
    assert not gone, (
        f"public in API {API} and not any more: {gone}: where a plugin that was made for it goes "
        f"on working, as with a new parameter that has a default, {MEND}; else keep it, or raise "
        "API in llmserve/api.py as well and say so in the changelog"
    )


def test_everything_public_is_listed() -> None:
    written = LISTED.read_text(encoding="utf-8").splitlines()
    new = sorted(set(listing()) - set(written))
    assert not new, f"public and not listed: {new}: begin its name with _, or {MEND}"


def test_a_change_of_a_signature_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = apilisting._parsed

    def changed(module: str) -> ast.Module:
        tree = parse(module)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "parse_assignments":
                node.args.args[0].arg = "renamed"
        return tree

    before = listing()
    monkeypatch.setattr(apilisting, "_parsed", changed)
    lines = set(before) ^ set(listing())
    assert len(lines) == 2
    assert all("llmserve.options.parse_assignments" in line for line in lines)


@pytest.mark.parametrize("module", MODULES)
def test_every_listed_name_is_there(module: str) -> None:
    names = public_names(module)
    assert names
    assert not [name for name in names if not hasattr(import_module(module), name)]


def used(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "llmserve":
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                (alias.name, "") for alias in node.names if alias.name.split(".")[0] == "llmserve"
            )


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: str(path.relative_to(ROOT)))
def test_plugins_use_only_what_is_public(path: Path) -> None:
    for module, name in used(path):
        if "scaffold" in path.parts and module.startswith("llmserve.scaffold"):
            continue
        names = ["", *public_names(module)] if module in MODULES else []
        assert name in names or f"{module}.{name}" in MODULES, f"{module}.{name} is not public"
