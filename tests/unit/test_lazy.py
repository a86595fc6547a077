"""The stubs of the public modules are the only list of their names, which load on first use."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import llmserve

PACKAGE = Path(llmserve.__file__).parent
STUBS = sorted(PACKAGE.rglob("*.pyi"))


def module_of(stub: Path) -> str:
    parts = stub.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


@pytest.mark.parametrize("stub", STUBS, ids=module_of)
def test_every_line_of_a_stub_is_a_name_that_the_module_has(stub: Path) -> None:
    module = import_module(module_of(stub))
    for line in stub.read_text(encoding="utf-8").splitlines():
        name = line.split()[-1]
        assert line == f"from {line.split()[1]} import {name} as {name}"
        assert getattr(module, name) is getattr(module, name)
        assert name in module.__all__
    assert dir(module) == module.__all__
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'x'"):
        _ = module.x


def test_importing_the_public_modules_loads_none_of_what_they_name() -> None:
    modules = sorted(map(module_of, STUBS))
    script = f"import sys, {', '.join(modules)}\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    loaded = {name for name in run.stdout.split() if name.startswith("llmserve")}
    assert loaded == {*modules, "llmserve.lazy"}
