"""From a plugin called *scaffold* to a package with a name of its own."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llmserve.api import API
from llmserve.errors import OutputError
from llmserve.scaffold.names import Names, check_free
from llmserve.version import __version__

SOURCES = Path(__file__).parent
REQUIRES = {
    "tokenizer": ("llmserve-hf", "tokenizers>=0.20"),
    "generator": ("accelerate>=1.0", "torch>=2.10", "transformers>=4.56"),
    "batching": ("llmserve-hf",),
    "formatter": ("llmserve-hf", "numpy>=1.24"),
    "recipe": ("llmserve-hf",),
    "command": ("click>=8.1",),
}
"""What the package of each role needs beside llmserve."""
KINDS = tuple(REQUIRES)
ROLES = KINDS[:-1]
"""What comes with a recipe, which can be built and served."""


def new_package(name: str, role: str, output: Path = Path()) -> Path:
    """Write a new plugin's package below a folder and return where it lies.

    Nothing is overwritten, and nothing is left behind by a failure.
    """
    names = Names.of(name)
    folder = output / names.distribution
    if folder.exists() or folder.is_symlink():
        raise OutputError(f"{folder} is there already", mend="choose another NAME or --output")
    check_free(names, role)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{names.distribution}-", dir=output) as scratch:
            made = Path(scratch) / names.distribution
            for path, text in _files(names, role):
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                (made / path).write_text(text, encoding="utf-8")
            made.rename(folder)
    except OSError as error:
        raise OutputError(f"{output} cannot be written to ({error.strerror})") from None
    return folder


def _files(names: Names, role: str) -> Iterator[tuple[str, str]]:
    """Go through every file of a new package, with its path in it."""
    home, common = SOURCES / role, SOURCES / "package"
    yield "README.md", names.replaced(_read(home / "README.md") + _develop(role), role)
    yield "pyproject.toml", _project(names, role)
    yield ".gitignore", _read(common / "gitignore")
    yield f"{names.package}/py.typed", ""
    for path in sorted(home.glob("*.py")):
        yield f"{names.package}/{path.name}", _module(path, names, role)
    conformance = common.glob("tests/*.py") if role in ROLES else ()
    for path in sorted([*home.glob("tests/*.py"), *conformance]):
        name = path.name.replace("scaffold", names.slug)
        yield f"tests/{name}", _module(path, names, role)


def _develop(role: str) -> str:
    text = _read(SOURCES / "package" / "README.md")
    if role in ROLES:
        return text
    text = text.replace("the unit tests, then a real Triton held to what every recipe promises", "")
    text = re.sub(r"(?m)^    llmserve (build|serve|query).*\n", "", text)
    return re.sub(r"(?m) +#? *$", "", text)


def _project(names: Names, role: str) -> str:
    text = names.replaced(_read(SOURCES / "package" / "pyproject.toml"), role)
    fitting = _range(__version__)
    needed = [f"llmserve{fitting}"]
    needed += [f"{name}{fitting}" if name == "llmserve-hf" else name for name in REQUIRES[role]]
    lines = "".join(f'    "{requirement}",\n' for requirement in needed)
    text = re.sub(r"(?m)^(dependencies = \[\n)(?: .*\n)*", lambda found: found[1] + lines, text)
    text = text.replace("llmserve.api2", f"llmserve.api{API}")
    kind = "batching strategy" if role == "batching" else role
    return text.replace(f"plugin {names.name}", f"plugin {names.name}: a {kind}", 1)


def _range(version: str) -> str:
    """Return the versions of llmserve that a package made with this one is made for.

    >>> _range("0.1.0"), _range("2.3.1")
    ('>=0.1,<0.2', '>=2.3,<3')
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    return f">={major}.{minor},<{major + 1 if major else f'0.{minor + 1}'}"


def _module(path: Path, names: Names, role: str) -> str:
    text = names.replaced(_read(path), role)
    return _with_own_imports_last(text, f"from {names.package}")


def _with_own_imports_last(text: str, own: str) -> str:
    """Put the package's own imports after those of llmserve, where a sorted file has them.

    Here they are modules of llmserve, and stand among the others.
    """
    lines = text.splitlines(keepends=True)
    moved = [line for line in lines if line.startswith(own)]
    kept = [line for line in lines if not line.startswith(own)]
    imports = [at for at, line in enumerate(kept) if line.startswith(("from ", "import "))]
    end = imports[-1] + 1
    return "".join([*kept[:end], *moved, *kept[end:]])


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
