"""Checks that the runtime classes of components can be used.

``problem_with`` looks for a class's module without importing it. ``check_models`` imports the
classes, in a separate process, and looks for the methods that their role requires: the build does
not load torch, and a broken plugin cannot end it. If asked to, it also lets the classes import what
they will load the model with, which takes seconds and finds an environment that cannot.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from llmserve.contract.tensors import MESSAGES
from llmserve.errors import reason
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import Generator
from llmserve.problems import Problem
from llmserve.repository.config import versions
from llmserve.repository.manifest import Manifest
from llmserve.repository.repository import Model
from llmserve.runtime import protocols

_PROTOCOLS: dict[str, type[Any]] = {
    "tokenizer": protocols.Tokenizer,
    "batching": protocols.Driver,
    "stage": protocols.Driver,
    "formatter": protocols.Formatter,
}
_GENERATORS: dict[str, type[Any]] = {
    "batch": protocols.Generator,
    "step": protocols.SteppingGenerator,
}
"""The protocols of a generator for the modes that the core defines."""
_TIMEOUT = 120


@dataclass(frozen=True)
class RuntimeClass:
    """A class that a manifest names, and the methods that it must have."""

    role: str
    name: str
    runtime: str
    methods: tuple[str, ...]
    model: str = ""
    """Its settings and the model that they are for, as JSON, if it shall try its imports."""
    folder: Path = field(default=Path(), compare=False)
    """The version folder that it is constructed with."""


def check_models(
    models: Iterable[Model], registry: Registry, *, imports: bool = False
) -> Iterator[tuple[RuntimeClass, Problem]]:
    """Import the classes that models name, and yield those that cannot be used.

    With ``imports``, each class also tries to import what it will load its model with. A problem is
    not fatal if only the packages of a class are missing here.
    """
    classes = [
        (model.name, runtime)
        for model in models
        if model.manifest
        for runtime in classes_of(model.manifest, registry, model.folder if imports else None)
    ]
    problems = check_classes(runtime for _, runtime in classes)
    for name, runtime in classes:
        if runtime in problems:
            what, fatal = problems[runtime]
            yield runtime, Problem(name, what, fatal=fatal, code="plugin")


def classes_of(
    manifest: Manifest, registry: Registry, folder: Path | None = None
) -> list[RuntimeClass]:
    """Return the classes that are instantiated in Triton for a model.

    With the model's folder, they know enough to try their imports.
    """
    if manifest.parts or (manifest.part_of and "stage" not in manifest.components):
        # An ensemble runs no class itself, and some of its parts run in other backends.
        return []
    classes = []
    staged = "stage" in manifest.components
    for role, component in manifest.components.items():
        if role == "batching" and staged:
            # The stage answers requests instead.
            continue
        methods = _methods(role, component["name"], registry)
        if MESSAGES.name not in manifest.contract.get("inputs", ()):
            methods = tuple(name for name in methods if name != "encode_chat")
        if role == "generator" and staged:
            # The plugin defines which methods its stage calls.
            methods = ()
        runtime_class = RuntimeClass(role, component["name"], component["runtime"], methods)
        if folder and (version := next(iter(versions(folder)), None)):
            model = json.dumps([component["settings"], manifest.source], sort_keys=True)
            runtime_class = replace(runtime_class, model=model, folder=version)
        classes.append(runtime_class)
    return classes


def _methods(role: str, name: str, registry: Registry) -> tuple[str, ...]:
    """Return the methods of a role's protocol; for a generator, those of all its modes."""
    required = [_PROTOCOLS[role]] if role in _PROTOCOLS else []
    if role == "generator":
        modes = {mode for g in registry.all(Generator) if g.name == name for mode in g.modes}
        required = [_GENERATORS[mode] for mode in sorted(modes & _GENERATORS.keys())]
    return tuple(
        method
        for protocol in required
        for method, value in vars(protocol).items()
        if callable(value) and not method.startswith("_")
    )


def check_classes(classes: Iterable[RuntimeClass]) -> dict[RuntimeClass, tuple[str, bool]]:
    """Import classes in another process; return what is wrong with each, and if it is fatal."""
    new = [c for c in dict.fromkeys(classes) if (c, *sys.path) not in _VALID]
    if not new:
        return {}
    asked = [(c.runtime, c.methods, c.model, str(c.folder)) for c in new]
    request = {"path": sys.path, "classes": asked}
    try:
        process = subprocess.run(
            [sys.executable, "-c", _CHILD],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=_TIMEOUT * len(new),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output, outcome = error.stdout or b"", f"did not finish within {_TIMEOUT * len(new)} s"
    else:
        output, outcome = process.stdout, f"ended the process with exit code {process.returncode}"
    problems = {}
    # The last one may be cut off in its middle.
    results = [json.loads(line) for line in output.splitlines(keepends=True) if line[-1:] == b"\n"]
    for runtime, result in zip(new, results, strict=False):
        if result:
            problems[runtime] = (result[0], result[1])
        else:
            _VALID.add((runtime, *sys.path))
    if len(results) < len(new):
        failed = new[len(results)]
        problems[failed] = (f"importing {failed.runtime.partition(':')[0]} {outcome}", True)
    return problems


_VALID: set[tuple[object, ...]] = set()
"""The classes that were found to be valid, so that a process of many builds checks each once."""
_CHILD = """
import json, sys
request = json.load(sys.stdin)
sys.path[:] = request["path"]
from llmserve.repository.runtimes import print_problems
print_problems(request["classes"])
"""


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


def problem_with(runtime: str) -> str | None:
    """Return why a component's ``package.module:Class`` cannot be found, or None."""
    module, _, name = runtime.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return f"{runtime!r} is not of the form package.module:Class"
    try:
        # Imports at most the parent packages of the module.
        exists = module in sys.modules or find_spec(module) is not None
    except (Exception, SystemExit):
        exists = False
    return None if exists else f"there is no module {module}"
