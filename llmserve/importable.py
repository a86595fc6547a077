"""Whether a module can be found, without importing anything where that can be avoided."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec


def problem_with(runtime: str) -> str | None:
    """Say why nothing can be made from a component's ``package.module:Class``, if so.

    >>> problem_with("llmserve.importable:Nothing") is None
    True
    >>> problem_with("llmserve.nowhere:Nothing")
    'there is no module llmserve.nowhere'
    """
    module, _, name = runtime.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return f"{runtime!r} is not of the form package.module:Class"
    return None if _is_found(module) else f"there is no module {module}"


def _is_found(module: str) -> bool:
    if module in sys.modules or _walk(module):
        return True
    # A package may add to its own path when it is imported, so the last word has the import of
    # the packages above the module. It happens only where the answer is about to be no.
    try:
        return importlib.util.find_spec(module) is not None
    except (Exception, SystemExit):
        return False


def _walk(module: str) -> bool:
    """Go down from the top package by asking the finders, which import nothing."""
    parts = module.split(".")
    path = None
    for depth in range(1, len(parts) + 1):
        spec = _ask_finders(".".join(parts[:depth]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
        if path is None:
            return depth == len(parts)
    return True


def _ask_finders(name: str, path: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is not None and (spec := find(name, path)) is not None:
            return spec if isinstance(spec, ModuleSpec) else None
    return None
