"""Imports runtime classes, in the process that :mod:`llmserve.repository.runtimes` starts for it.

It imports nothing else that takes time: every first build of a process waits for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from llmserve.errors import reason


def print_problems(classes: Iterable[tuple[str, list[str], str, str]]) -> None:
    """Print a line of JSON with the problem of each class; this runs in the child process."""
    # Output that plugins print on import is redirected to standard error.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # This module exists only inside Triton, and plugins may import it at the top level.
    sys.modules["triton_python_backend_utils"] = _StubModule("triton_python_backend_utils")
    for runtime, methods, model, folder in classes:
        problem = _class_problem(runtime, methods)
        if model and not problem:
            problem = _import_problem(runtime, json.loads(model)[0], Path(folder))
        print(json.dumps(problem), file=out, flush=True)
    out.flush()
    # Skip clean-up: none is needed here, and that of libraries takes long.
    os._exit(0)


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _class_problem(runtime: str, methods: Iterable[str]) -> tuple[str, bool] | None:
    module, _, name = runtime.partition(":")
    try:
        runtime_class = getattr(import_module(module), name, None)
    except BaseException as error:
        package = module.partition(".")[0]
        missing_module = error.name if isinstance(error, ModuleNotFoundError) else None
        is_other = missing_module is not None and missing_module.partition(".")[0] != package
        return f"importing {module} fails: {reason(error)}", not is_other
    if runtime_class is None:
        return f"{module} has no {name}", True
    if not isinstance(runtime_class, type):
        return None if callable(runtime_class) else (f"{runtime} is not a class", True)
    if missing := [name for name in methods if not callable(getattr(runtime_class, name, None))]:
        return f"{runtime} has no method {' or '.join(missing)}", True
    try:
        signature(runtime_class).bind({}, Path())
    except TypeError:
        return f"{runtime} cannot be constructed with (settings, folder)", True
    except ValueError:
        # A class written in C may have no signature.
        pass
    return None


def _import_problem(
    runtime: str, settings: Mapping[str, Any], folder: Path
) -> tuple[str, bool] | None:
    """Return why a valid class cannot import what it will load its model with."""
    module, _, name = runtime.partition(":")
    try_imports = getattr(getattr(import_module(module), name), "try_imports", None)
    try:
        if try_imports:
            try_imports(settings, folder)
    except BaseException as error:
        return f"the packages installed here cannot load the model: {reason(error)}", True
    return None
