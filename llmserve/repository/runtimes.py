"""Checks that the runtime classes of components can be used.

``problem_with`` looks for a class's module without importing it. ``check_models`` imports the
classes, in a separate process, and looks for the methods that their role requires: the build does
not load torch, and a broken plugin cannot end it. If asked to, it also lets the classes import what
they will load the model with, which takes seconds and finds an environment that cannot.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmserve.contract.tensors import MESSAGES
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
        if model.manifest and not model.is_ensemble
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
    if manifest.part_of and "stage" not in manifest.components:
        # It runs in another backend.
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
from llmserve.repository.importing import print_problems
print_problems(request["classes"])
"""


def problem_with(runtime: str) -> str | None:
    """Return why a component's ``package.module:Class`` cannot be found, or None."""
    module, _, name = runtime.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return f"{runtime!r} is not of the form package.module:Class"
    try:
        # Imports at most the parent packages of the module.
        exists = module in sys.modules or find_spec(module) is not None
    except KeyboardInterrupt:
        raise
    except BaseException:
        exists = False
    return None if exists else f"there is no module {module}"
