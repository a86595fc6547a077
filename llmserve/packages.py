"""The installed packages: which of them conflict, where each came from, and how to add more.

Every command that llmserve prints for installing something is composed here, because it must not
break what is installed: the embedded Triton needs numpy 1, and pip, asked for anything else, moves
to numpy 2 and says so only afterwards.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from llmserve.names import normal

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OLD_NUMPY = "numpy<2"
EMBEDDED = "nvidia-pytriton"
"""The distribution of the embedded Triton."""
_LAST_OLD_NUMPY = "1.26.4"
"""The last release of numpy 1."""
_INCLUDING_EMBEDDED = {"embedded", "all"}
"""The extras of llmserve that install the embedded Triton."""


@dataclass(frozen=True)
class Conflict:
    """An installed package, and what it requires of another that is installed in other versions."""

    package: str
    version: str
    requires: str
    found: str

    def __str__(self) -> str:
        found = f"{_name(self.requires)} {self.found} is installed"
        return f"{self.package} {self.version} needs {self.requires}, and {found}"


def conflicts() -> list[Conflict]:
    """Return what installed packages require and do not get, by their metadata.

    What is missing is not listed: the first import of it says so.
    """
    found, installed = [], _installed()
    for package, requirement in _requirements(installed):
        other = installed.get(normal(requirement.name))
        if other and not requirement.specifier.contains(other.version, prereleases=True):
            wanted = f"{requirement.name}{requirement.specifier}"
            found.append(Conflict(package.name, package.version, wanted, other.version))
    return found


def install_command(*requirements: str, editable: str = "") -> str:
    """Return the command that installs requirements here, and leaves working what is installed.

    ``editable`` is the folder of one more package, with its extras, that is installed as it lies
    there. From a clone, our own packages are installed from it. Beside the embedded Triton, numpy
    stays below 2, and what is installed for numpy 2 is named, so that pip chooses versions of it
    for numpy 1.
    """
    words = ["-e", editable] if editable else []
    words += [word for text in requirements for word in _from_clone(text)]
    if _keeps_old_numpy(requirements):
        present = {_name(text) for text in requirements}
        words += [] if OLD_NUMPY in requirements else [OLD_NUMPY]
        words += [name for name in _built_for_new_numpy() if name not in present]
    return " ".join([_pip(), "install", *map(quote, words)])


def remedy(otherwise: str) -> str:
    """Return how to repair the environment if packages conflict, which explains most failures."""
    found = conflicts()
    if not found:
        return otherwise
    old = has_embedded() and "numpy" in {_name(conflict.requires) for conflict in found}
    names = sorted({conflict.package for conflict in found})
    return f"{found[0]}: {install_command(OLD_NUMPY) if old else install_command(*names)}"


def has_embedded() -> bool:
    """Return whether the embedded Triton is installed."""
    with suppress(metadata.PackageNotFoundError):
        return sys.version_info < (3, 13) and bool(metadata.version(EMBEDDED))
    return False


def too_new_numpy() -> str | None:
    """Return the version of numpy if it is too new for the embedded Triton."""
    version = metadata.version("numpy")
    return version if int(version.split(".")[0]) >= 2 else None


def python_of(name: str) -> str:
    """Return which versions of Python an installed package asks for; empty if it takes all."""
    with suppress(metadata.PackageNotFoundError):
        return "".join(metadata.metadata(name).get_all("Requires-Python") or ())
    return ""


def runs_with(required: str, python: str) -> bool:
    """Return whether a version of Python is one of those that a package asks for."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(required).contains(python)
    except InvalidSpecifier:
        return True


def _keeps_old_numpy(requirements: Iterable[str]) -> bool:
    extras = {
        extra.strip()
        for text in requirements
        if (match := re.match(r"llmserve\[([^]]*)\]", text))
        for extra in match[1].split(",")
    }
    asked = sys.version_info < (3, 13) and bool(extras & _INCLUDING_EMBEDDED)
    return asked or OLD_NUMPY in requirements or has_embedded()


def _built_for_new_numpy() -> list[str]:
    """Return the installed packages that cannot use numpy 1, and those that need these packages."""
    needed: dict[str, set[str]] = {}
    names: set[str] = set()
    for package, requirement in _requirements(_installed()):
        needed.setdefault(normal(package.name), set()).add(normal(requirement.name))
        is_numpy = normal(requirement.name) == "numpy"
        if is_numpy and not requirement.specifier.contains(_LAST_OLD_NUMPY):
            names.add(normal(package.name))
    pending = set(names)
    while pending:
        # pip looks only at the packages that it is asked for and at what these need.
        pending = {name for name, others in needed.items() if others & pending} - names
        names |= pending
    return sorted(names)


@dataclass(frozen=True)
class _Package:
    name: str
    version: str
    requires: tuple[str, ...]


# A value may go on in lines that are indented.
_FIELD = re.compile(r"^(Name|Version|Requires-Dist):[ \t]*(.*(?:\n[ \t].*)*)", re.M | re.I)


def _installed() -> dict[str, _Package]:
    """Return the installed packages by name: the first of a name on the path is the one imported.

    Every build asks for them, so only the fields that are needed are read, and each file once.
    """
    found: dict[str, _Package] = {}
    for distribution in metadata.distributions():
        with suppress(Exception):
            package = _read(distribution)
            found.setdefault(normal(package.name), package)
    return found


def _read(distribution: metadata.Distribution) -> _Package:
    text = distribution.read_text("METADATA")
    if text is None:
        # An older form, which has what it requires in another file.
        requires = tuple(distribution.requires or ())
        return _Package(distribution.name, distribution.version, requires)
    fields: dict[str, list[str]] = {"name": [], "version": [], "requires-dist": []}
    # After the first empty line is the description, which may say anything. A line of spaces is not
    # one: a license may have it.
    for name, value in _FIELD.findall(re.split(r"\r?\n\r?\n", text, maxsplit=1)[0]):
        fields[name.lower()].append(" ".join(value.split()))
    return _Package(fields["name"][0], fields["version"][0], tuple(fields["requires-dist"]))


def _requirements(installed: Mapping[str, _Package]) -> Iterator[tuple[_Package, Requirement]]:
    """Yield what each installed package requires here, without its extras."""
    from packaging.requirements import InvalidRequirement, Requirement

    for package in installed.values():
        for text in package.requires:
            if _of_extra(text):
                continue
            with suppress(InvalidRequirement):
                requirement = Requirement(text)
                if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
                    yield package, requirement


def _of_extra(requirement: str) -> bool:
    """Return whether it surely is that of an extra; most are, and parsing them takes longest."""
    marker = requirement.partition(";")[2]
    return "extra ==" in marker and " or " not in marker


def _name(requirement: str) -> str:
    return normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def _pip() -> str:
    """Return the pip of this environment, which need not be the first on the path."""
    first = shutil.which("pip")
    own = Path(sys.executable).parent
    return "pip" if first and Path(first).parent == own else f"{quote(sys.executable)} -m pip"


def _from_clone(requirement: str) -> list[str]:
    """Return the words that install a package: if it is ours and this is a clone, from there."""
    match = re.fullmatch(r"(llmserve)(?:-([a-z0-9-]+))?(\[[^]]*\])?(?:==.*)?", requirement)
    own = origin("llmserve")
    if not (match and own and own.editable):
        return [requirement]
    folder = own.folder / "plugins" / match[2] if match[2] else own.folder
    if not (folder / "pyproject.toml").is_file():
        return [requirement]
    with suppress(ValueError):
        folder = folder.relative_to(Path.cwd())
    return ["-e", f"{folder}{match[3] or ''}"]


# Where a package came from: PEP 610.


@dataclass(frozen=True)
class Origin:
    """What an installed package was installed from, if that was no index.

    ``url`` is where pip gets the same from on another machine: a commit of a repository, or an
    archive. It is empty if only this machine has it: a folder, or a file.
    """

    url: str = ""
    folder: Path = Path()
    editable: bool = False


def origin(name: str) -> Origin | None:
    """Return where a package was installed from, None for an index."""
    try:
        text = metadata.distribution(name).read_text("direct_url.json")
        content = json.loads(text or "null")
        url = content["url"]
        address = urlsplit(url)
    except (metadata.PackageNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None
    if address.scheme in ("", "file"):
        editable = bool(content.get("dir_info", {}).get("editable"))
        return Origin(folder=Path(unquote(address.path)), editable=editable)
    return Origin(_elsewhere(content, url))


# A fragment has hashes and folders; a query may have a token.
_SAFE_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9._~:/@%+,=!-]+(#[A-Za-z0-9._/=&-]+)?")


def _elsewhere(content: dict[str, Any], url: str) -> str:
    """Return a URL from which pip gets exactly the same; empty if there is none."""
    # A password or token in it must not get into files; a user of ssh is no secret.
    if urlsplit(url).scheme in ("http", "https"):
        address = urlsplit(url)
        url = address._replace(netloc=address.netloc.rpartition("@")[2], fragment="").geturl()
    vcs = content.get("vcs_info")
    fragments = []
    if isinstance(vcs, dict):
        url = f"{vcs.get('vcs')}+{url}@{vcs.get('commit_id')}"
    else:
        archive = content.get("archive_info") or {}
        hashes = archive.get("hashes") or {}
        digest = hashes.get("sha256") or str(archive.get("hash", "")).removeprefix("sha256=")
        fragments += [f"sha256={digest}"] if re.fullmatch(r"[0-9a-f]{64}", str(digest)) else []
    if subdirectory := content.get("subdirectory"):
        fragments.append(f"subdirectory={subdirectory}")
    url += f"#{'&'.join(fragments)}" if fragments else ""
    return url if is_address(url) else ""


def is_address(text: str) -> bool:
    """Return whether a text is the address of a package and nothing else: it goes into files."""
    return bool(_SAFE_URL.fullmatch(text))
