"""Whether the classes that components name can be run.

``problem_with`` looks for a class's module without importing it. ``check_models`` imports the
classes, in a process of its own, and looks for the methods that their role asks for: torch is not
loaded into the build, and no broken plugin ends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from llmserve.errors import reason
from llmserve.registry import Registry
from llmserve.repository.manifest import Manifest
from llmserve.roles import Generator
from llmserve.runtime import protocols
from llmserve.runtime.contract import MESSAGES

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
"""What is asked of a generator by the modes that the core's protocols describe."""
_PATIENCE = 120


@dataclass(frozen=True)
class RuntimeClass:
    """A class that a manifest names, and the methods that will be called."""

    role: str
    name: str
    runtime: str
    methods: tuple[str, ...]


@dataclass(frozen=True)
class ClassProblem:
    """What is wrong with a class. It is not ``fatal`` where only its packages are missing here."""

    what: str
    fatal: bool = True


def check_models(
    manifests: Mapping[str, Manifest], registry: Registry
) -> Iterator[tuple[str, RuntimeClass, ClassProblem]]:
    """Import the classes that models name, and go through those that cannot be run."""
    classes = [
        (model, each)
        for model, manifest in manifests.items()
        for each in classes_of(manifest, registry)
    ]
    problems = check_classes(each for _, each in classes)
    for model, each in classes:
        if each in problems:
            yield model, each, problems[each]


def classes_of(manifest: Manifest, registry: Registry) -> list[RuntimeClass]:
    """Return the classes that Triton makes for a model, each with what is asked of it."""
    if manifest.parts or (manifest.part_of and "stage" not in manifest.components):
        # An ensemble runs nothing itself, and some of its parts run in other backends.
        return []
    found = []
    staged = "stage" in manifest.components
    for role, component in manifest.components.items():
        if role == "batching" and staged:
            # The stage answers requests in its place.
            continue
        methods = _methods(role, component["name"], registry)
        if MESSAGES.name not in manifest.contract.get("inputs", ()):
            methods = tuple(name for name in methods if name != "encode_chat")
        if role == "generator" and staged:
            # What a stage asks of it is between the two.
            methods = ()
        found.append(RuntimeClass(role, component["name"], component["runtime"], methods))
    return found


def _methods(role: str, name: str, registry: Registry) -> tuple[str, ...]:
    """Return the methods of a role's protocol; of a generator those of all modes it declares."""
    asked = [_PROTOCOLS[role]] if role in _PROTOCOLS else []
    if role == "generator":
        modes = {mode for g in registry.all(Generator) if g.name == name for mode in g.modes}
        asked = [_GENERATORS[mode] for mode in sorted(modes & _GENERATORS.keys())]
    return tuple(
        method
        for protocol in asked
        for method, value in vars(protocol).items()
        if callable(value) and not method.startswith("_")
    )


def check_classes(classes: Iterable[RuntimeClass]) -> dict[RuntimeClass, ClassProblem]:
    """Import classes in another process and return what is wrong with them."""
    new = [each for each in dict.fromkeys(classes) if (each, *sys.path) not in _SOUND]
    if not new:
        return {}
    ask = {"path": sys.path, "classes": [[each.runtime, each.methods] for each in new]}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD],
            input=json.dumps(ask).encode(),
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output, ended = error.stdout or b"", f"was not done after {_PATIENCE} s"
    else:
        output, ended = done.stdout, f"ended the process with exit code {done.returncode}"
    problems = {}
    answers = [json.loads(line) for line in output.splitlines()]
    for each, answer in zip(new, answers, strict=False):
        if answer:
            problems[each] = ClassProblem(*answer)
        else:
            _SOUND.add((each, *sys.path))
    if len(answers) < len(new):
        culprit = new[len(answers)]
        problems[culprit] = ClassProblem(f"importing {culprit.runtime.partition(':')[0]} {ended}")
    return problems


_SOUND: set[tuple[object, ...]] = set()
"""What was found to be sound: a process that builds much asks once for each class."""
_CHILD = """
import json, sys
ask = json.load(sys.stdin)
sys.path[:] = ask["path"]
from llmserve.repository.runtimes import print_problems
print_problems(ask["classes"])
"""


def print_problems(classes: Iterable[tuple[str, list[str]]]) -> None:
    """Print what is wrong with each class, a line of JSON each: this runs in the other process."""
    # What plugins print when they are imported goes elsewhere.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # It exists only within Triton, and modules may import it at their top.
    sys.modules["triton_python_backend_utils"] = _Anything("triton_python_backend_utils")
    for runtime, methods in classes:
        print(json.dumps(_class_problem(runtime, methods)), file=out, flush=True)
    out.flush()
    # Nothing here needs to be ended in order, and libraries take their time for that.
    os._exit(0)


class _Anything(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _class_problem(runtime: str, methods: Iterable[str]) -> tuple[str, bool] | None:
    module, _, name = runtime.partition(":")
    try:
        found = getattr(import_module(module), name, None)
    except BaseException as error:
        own = module.partition(".")[0]
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        elsewhere = absent is not None and absent.partition(".")[0] != own
        return f"importing {module} fails: {reason(error)}", not elsewhere
    if found is None:
        return f"{module} has no {name}", True
    if not isinstance(found, type):
        return None if callable(found) else (f"{runtime} is no class", True)
    if missing := [method for method in methods if not callable(getattr(found, method, None))]:
        return f"{runtime} has no method {' or '.join(missing)}", True
    try:
        signature(found).bind({}, Path())
    except TypeError:
        return f"{runtime} cannot be made with (settings, folder)", True
    except ValueError:
        # A class made in C tells no signature.
        pass
    return None


def problem_with(runtime: str) -> str | None:
    """Say why nothing can be made from a component's ``package.module:Class``, if so."""
    module, _, name = runtime.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return f"{runtime!r} is not of the form package.module:Class"
    try:
        # Imports at most the packages above the module.
        found = module in sys.modules or find_spec(module) is not None
    except (Exception, SystemExit):
        found = False
    return None if found else f"there is no module {module}"
