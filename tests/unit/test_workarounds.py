"""Each workaround has its row, which names the code that makes up for a fault of others."""

from __future__ import annotations

from functools import reduce
from importlib import import_module

import pytest

from llmserve import client, server
from llmserve.builder import gguf
from llmserve.contract.workaround import Workaround
from llmserve.runtime import torch

ROWS = {
    (package, name): row
    for package in (client.__name__, server.__name__, gguf.__name__, torch.__name__)
    for name, row in vars(import_module(f"{package}.workarounds")).items()
    if isinstance(row, Workaround)
}


@pytest.mark.parametrize(("package", "name"), ROWS)
def test_what_a_row_names_is_there(package: str, name: str) -> None:
    row = ROWS[package, name]
    assert row.done_by
    for place in row.done_by:
        module, _, path = place.partition(":")
        home = import_module(f"{package}.{module}")
        assert reduce(getattr, path.split("."), home) is not None
