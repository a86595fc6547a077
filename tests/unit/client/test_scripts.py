"""The scripts that models are emitted with: each stands alone, and they say the same."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmserve.client import script, value_script
from llmserve.contract.tensors import TYPES


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


@pytest.mark.parametrize("short", [name for name in TYPES if name != "TYPE_STRING"])
def test_numbers_of_every_type_are_read(short: str) -> None:
    values = np.array([0, 1, 1]).astype(TYPES[short])
    assert value_script._numbers(short.removeprefix("TYPE_"), values.tobytes()) == [0, 1, 1]


def test_options_are_sent_alike() -> None:
    options = {"a": 0.5, "b": True, "c": 3, "d": [1], "e": "x", "f": None, "g": 2**70}
    config: Any = SimpleNamespace(name="m", max_batch_size=8)
    ours = value_script._request(config, ["text"], None, options).parameters
    assert ours == script._request(config, "text", options).parameters
    assert ours["a"].double_param == 0.5


def test_a_line_of_values_is_json_and_cannot_control_the_terminal() -> None:
    values = {"label": ["b\x9b31mse", "del\x7f", "gr\u00fcn", "new\u2028line", "\x1b[1m"]}
    line = value_script._line(values)
    assert json.loads(line) == values
    assert "gr\u00fcn" in line
    assert line.removesuffix("\n").isprintable()
