"""Loads the public names of a module on first use.

The module's stub, the ``.pyi`` beside it, is their only list: type checkers read it, and so does
:func:`lazy`, once the first name is asked for. Each of its lines is ``from MODULE import X as X``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def lazy(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` of a module that has a stub."""

    @cache
    def homes() -> dict[str, str]:
        stub = Path(str(sys.modules[module].__file__)).with_suffix(".pyi")
        imports = map(str.split, stub.read_text(encoding="utf-8").splitlines())
        return {words[-1]: words[1] for words in imports}

    def load(name: str) -> Any:
        if name == "__all__":
            return names()
        if name not in homes():
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        # Also imports a submodule, if the name is one.
        return getattr(__import__(homes()[name], fromlist=[name]), name)

    def names() -> list[str]:
        return sorted(homes())

    return load, names
