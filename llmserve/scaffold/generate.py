"""Generates a plugin package from the templates called *scaffold*."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from llmserve.errors import OutputError, UsageError
from llmserve.names import normal
from llmserve.plugins.api import API
from llmserve.plugins.registry import Registry
from llmserve.version import __version__

SOURCES = Path(__file__).parent
REQUIRES = {
    "tokenizer": ("llmserve-hf", "tokenizers>=0.20"),
    "generator": ("accelerate>=1.0", "torch>=2.10", "transformers>=4.56"),
    "batching": ("llmserve-hf",),
    "formatter": ("llmserve-hf", "numpy>=1.24"),
    "recipe": ("llmserve-hf",),
    "command": ("click>=8.1",),
    "frontend": (),
}
"""The dependencies of each kind of package besides llmserve."""
KINDS = tuple(REQUIRES)
ROLES = tuple(kind for kind in KINDS if kind not in ("command", "frontend"))
"""The kinds that include a recipe, which can be built and served."""
STEP = "step"
RUNNER = "runner"
MODES = ("batch", STEP, RUNNER)
"""How the generator of a new package can be driven."""
TEMPLATES = {STEP: "stepper", RUNNER: "runner"}
"""The templates of generators that are not driven by batches."""
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_MAX_LENGTH = 32


class Names:
    """The names of a plugin, its package and its classes, derived from one name."""

    def __init__(self, name: str) -> None:
        if name.startswith(("llmserve-", "llmserve_")):
            raise UsageError(
                f"{name!r} cannot be a plugin's name",
                hint=f"leave out llmserve: the package of {name[9:]!r} is called llmserve-NAME",
            )
        if not _NAME.fullmatch(name) or len(name) > _MAX_LENGTH:
            raise UsageError(
                f"{name!r} cannot be a plugin's name",
                hint=f"use at most {_MAX_LENGTH} lowercase letters, digits and single '-', "
                "beginning with a letter, as in acme-words",
            )
        self.name = name
        self.slug = name.replace("-", "_")
        self.distribution = f"llmserve-{name}"
        self.package = f"llmserve_{self.slug}"

    def replaced(self, text: str, role: str) -> str:
        """Return the text of a template with this name in place of scaffold."""
        # The class of acme-tokenizer is AcmeTokenizer, not AcmeTokenizerTokenizer.
        camel_case = "".join(word.capitalize() for word in self.name.split("-"))
        prefix = camel_case.removesuffix(role.capitalize()) or camel_case
        for old, new in (
            (f"llmserve.scaffold.{role}", self.package),
            *((f"llmserve.scaffold.{name}", self.package) for name in TEMPLATES.values()),
            ("llmserve_scaffold", self.package),
            ("Scaffold", prefix),
            ("scaffold", self.name),
        ):
            text = text.replace(old, new)
        return text


def new_package(name: str, role: str, output: Path = Path(), *, mode: str = "batch") -> Path:
    """Write a new plugin's package into ``output`` and return its folder.

    ``mode`` is how its generator is driven, if it has one. Nothing is overwritten, and a
    failure leaves nothing behind.
    """
    if mode != "batch" and role != "generator":
        raise UsageError(f"a {role} has no mode", hint="leave out --mode, or use --role generator")
    names = Names(name)
    folder = output / names.distribution
    if folder.exists() or folder.is_symlink():
        raise OutputError(f"{folder} already exists", hint="choose another NAME or --output")
    check_free(names, role)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{names.distribution}-", dir=output) as scratch:
            package = Path(scratch) / names.distribution
            for path, text in _files(names, role, mode):
                (package / path).parent.mkdir(parents=True, exist_ok=True)
                (package / path).write_text(text, encoding="utf-8")
            package.rename(folder)
    except OSError as error:
        raise OutputError(f"{output} cannot be written to ({error.strerror})") from None
    return folder


def check_free(names: Names, role: str) -> None:
    """Refuse a name that is installed: one of the two would have to be disabled."""
    registry = Registry.load()
    for plugin in registry.plugins:
        if plugin.name == names.name:
            raise _taken(names, f"it is plugin {plugin}")
    for entry in registry.entries:
        if entry.component.name == names.name and entry.role in ("recipe", role):
            raise _taken(names, f"{entry.plugin} has a {entry.role} of that name")
    distributions = {normal(plugin.origin) for plugin in registry.plugins}
    if names.distribution in distributions or find_spec(names.package) is not None:
        raise _taken(names, f"{names.distribution} is installed here")


def _taken(names: Names, reason: str) -> UsageError:
    return UsageError(f"the name {names.name!r} is taken: {reason}", hint="choose another")


def _files(names: Names, role: str, mode: str) -> Iterator[tuple[str, str]]:
    """Yield the path and text of every file of a new package."""
    template, common = SOURCES / TEMPLATES.get(mode, role), SOURCES / "package"
    yield "README.md", names.replaced(_read(template / "README.md") + _develop(role), role)
    yield "pyproject.toml", _project(names, role, mode)
    yield ".gitignore", _read(common / "gitignore")
    yield f"{names.package}/py.typed", ""
    for path in sorted(template.glob("*.py")):
        yield f"{names.package}/{path.name}", names.replaced(_read(path), role)
    conformance = common.glob("tests/*.py") if role in ROLES else ()
    for path in sorted([*template.glob("tests/*.py"), *conformance]):
        name = path.name.replace("scaffold", names.slug)
        yield f"tests/{name}", names.replaced(_read(path), role)


def _develop(role: str) -> str:
    text = _read(SOURCES / "package" / "README.md")
    if role in ROLES:
        return text
    suite = "the unit tests, then the conformance suite" if role == "frontend" else ""
    text = text.replace("the unit tests, then the conformance suite on a real Triton", suite)
    text = re.sub(r"(?m)^    llmserve (build|serve|query).*\n", "", text)
    return re.sub(r"(?m) +#? *$", "", text)


def _requires(role: str, mode: str) -> tuple[str, ...]:
    return ("numpy>=1.24", "transformers>=4.56") if mode == RUNNER else REQUIRES[role]


def _project(names: Names, role: str, mode: str) -> str:
    text = names.replaced(_read(SOURCES / "package" / "pyproject.toml"), role)
    versions = _range(__version__)
    required = [f"llmserve{versions}"]
    required += [
        f"{name}{versions}" if name == "llmserve-hf" else name for name in _requires(role, mode)
    ]
    lines = "".join(f'    "{requirement}",\n' for requirement in required)
    text = re.sub(r"(?m)^(dependencies = \[\n)(?: .*\n)*", lambda match: match[1] + lines, text)
    text = text.replace("llmserve.api3", f"llmserve.api{API}")
    kind = "batching strategy" if role == "batching" else role
    return text.replace(f"plugin {names.name}", f"plugin {names.name}: a {kind}", 1)


def _range(version: str) -> str:
    """Return the range of llmserve versions that a new package supports."""
    major, minor = (int(part) for part in version.split(".")[:2])
    # An unreleased version comes before the release: it must be named itself to be included.
    least = f"{major}.{minor}" if version.replace(".", "").isdigit() else version
    return f">={least},<{major + 1 if major else f'0.{minor + 1}'}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
