"""The scripts that models are emitted with: each stands alone, and they say the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from llmserve.client import script, value_script


def parts(path: str) -> dict[str, str]:
    source = Path(path).read_text(encoding="utf-8")
    return {
        node.name: ast.get_source_segment(source, node) or ""
        for node in ast.parse(source).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }


@pytest.mark.parametrize(
    "name", ["RequestError", "default_model", "_channel", "_explain", "_one_line"]
)
def test_what_both_scripts_have_is_the_same(name: str) -> None:
    assert parts(script.__file__)[name] == parts(value_script.__file__)[name]
