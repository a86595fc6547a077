"""The scripts that models are emitted with: each stands alone, and they have the same parts."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmserve.builder.client_script import client_script
from llmserve.client import messages, script, value_script
from llmserve.contract.tensors import TYPES


@pytest.mark.parametrize("module", [script, value_script])
def test_an_emitted_client_stands_alone_and_has_nothing_that_it_does_not_use(
    module: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "client.py"
    path.write_text(client_script(module.__name__), encoding="utf-8")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) == module.__doc__.strip()  # type: ignore[union-attr]
    of = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in of if name and name.startswith("llmserve")]
    defined = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert len(defined) == len(set(defined))
    # Names that are missing, imports that are not used or sorted, and how it is laid out.
    for words in (["check", "--select", "F,I,E"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--line-length", "100", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_client_of_others_is_emitted_as_it_is() -> None:
    source = Path(str(messages.__file__)).read_text(encoding="utf-8")
    assert client_script("llmserve.client.messages") == source


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
