"""What models need of the environment that serves them: packages, and the classes in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmserve.check.problem import Problem
from llmserve.errors import ConfigError
from llmserve.importable import problem_with
from llmserve.manifest import Manifest, parts_of


def check_needs(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    """Say which packages of a model are missing here or of another version, and which classes."""
    for package, wanted in manifest.packages.items():
        try:
            found = version(package).partition("+")[0]
        except PackageNotFoundError:
            yield Problem(
                folder.name,
                f"it needs {package}, which is not installed here",
                f"pip install {package}=={wanted}, or serve it from its container",
            )
            continue
        if found != wanted:
            yield Problem(
                folder.name,
                f"it was built with {package} {wanted}, and {found} is installed here",
                "build it again",
                fatal=False,
            )
    for role, component in manifest.components.items():
        if problem := problem_with(component["runtime"]):
            yield Problem(
                folder.name,
                f"its {role} {component['name']!r} cannot be run: {problem}",
                "install the plugin it comes from, or serve it from its container",
            )


def check_environment(repository: Path, models: Sequence[str] = ()) -> list[Problem]:
    """Return what a server in this environment would lack for some models, or for all.

    >>> check_environment(Path("model_repository"), ["none of these"])
    []
    """
    names = models or sorted(path.name for path in repository.iterdir())
    wanted = dict.fromkeys(name for each in names for name in (*parts_of(repository, each), each))
    problems: list[Problem] = []
    for folder in (repository / name for name in wanted):
        # A damaged manifest is told by its own model when it is loaded.
        with suppress(ConfigError):
            if manifest := Manifest.read(folder):
                problems += check_needs(folder, manifest)
    return problems
