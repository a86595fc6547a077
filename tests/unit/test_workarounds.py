"""Each workaround has its row, and whatever makes up for a fault refers to its row."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module
from inspect import getsource
from pathlib import Path

import pytest

from llmserve import client, server
from llmserve.builder import gguf
from llmserve.contract.workaround import Workaround

ROWS = {
    (package, name): row
    for package in (client.__name__, server.__name__, gguf.__name__)
    for name, row in vars(import_module(f"{package}.workarounds")).items()
    if isinstance(row, Workaround)
}
MEASURED = {"machine.py"}
"""What only says which Triton its figures are of."""


@pytest.mark.parametrize(("package", "name"), ROWS)
def test_a_row_names_what_is_done_and_that_names_the_row(package: str, name: str) -> None:
    row = ROWS[package, name]
    assert row.done_by
    for place in row.done_by:
        module, _, path = place.partition(":")
        home = import_module(f"{package}.{module}")
        assert reduce(getattr, path.split("."), home) is not None
        assert name in getsource(home), place


@pytest.mark.parametrize("package", [client, server])
def test_nothing_else_tells_a_fault_of_triton(package: object) -> None:
    folder, fault = Path(package.__file__).parent, re.compile(r"Triton \(?2\.|for ?ever\b")  # type: ignore[attr-defined]
    rows = folder / "workarounds.py"
    assert fault.search(rows.read_text(encoding="utf-8"))
    for path in {*folder.rglob("*.py")} - {rows}:
        found = fault.search(path.read_text(encoding="utf-8"))
        assert not found or path.name in MEASURED, path
