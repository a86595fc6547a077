"""Each workaround has its row, and whatever makes up for a fault refers to its row."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module
from inspect import getsource
from pathlib import Path

import pytest

from llmserve import server
from llmserve.server import workarounds
from llmserve.server.workarounds import Workaround

ROWS = {name: row for name, row in vars(workarounds).items() if isinstance(row, Workaround)}
FOLDER = Path(str(server.__file__)).parent
MEASURED = {"machine.py"}
"""What only says which Triton its figures are of."""


@pytest.mark.parametrize("name", ROWS)
def test_a_row_names_what_is_done_and_that_names_the_row(name: str) -> None:
    assert ROWS[name].done_by
    for place in ROWS[name].done_by:
        module, _, path = place.partition(":")
        home = import_module(f"llmserve.server.{module}")
        assert reduce(getattr, path.split("."), home) is not None
        assert name in getsource(home), place


def test_no_other_source_of_the_server_tells_a_fault_of_triton() -> None:
    rows, fault = FOLDER / "workarounds.py", re.compile(r"Triton \(?2\.|for ?ever\b")
    assert fault.search(rows.read_text(encoding="utf-8"))
    for path in {*FOLDER.rglob("*.py")} - {rows}:
        found = fault.search(path.read_text(encoding="utf-8"))
        assert not found or path.name in MEASURED, path
