"""Wheels of what is installed here, for images that no index could give it to.

They are beside the Dockerfile: in a repository Triton ignores files, but takes a folder for a
model.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from llmserve.errors import OutputError, PluginError
from llmserve.names import normal
from llmserve.packages import origin

Wheels = Mapping[tuple[str, str], str]
"""The file names of wheels, by the name and version of their package."""

# What an installer adds, and the list that is written anew.
_NOT_IN_WHEELS = {"INSTALLER", "REQUESTED", "direct_url.json", "RECORD", "RECORD.jws", "RECORD.p7s"}
# Also written into the Dockerfile.
_FILE = re.compile(r"(?P<name>\w[\w.]*)-(?P<version>\w[\w.!+]*)(-\w+)?-[\w.]+-[\w.]+-[\w.]+\.whl")
_DATE = (1980, 1, 1, 0, 0, 0)
"""The date of all files in a wheel, so that the same files make the same wheel."""
_TIMEOUT = 300


def wheels_in(folder: Path) -> dict[tuple[str, str], str]:
    """Return the wheels in a folder by the name and version of their package."""
    return wheels_named(sorted(path.name for path in folder.glob("*.whl")))


def wheels_named(files: Iterable[str]) -> dict[tuple[str, str], str]:
    """Return the files that have the name of a wheel, by the name and version of their package."""
    matches = [_FILE.fullmatch(file) for file in files]
    return {(normal(m["name"]), m["version"]): m[0] for m in matches if m}


def make_wheels(
    packages: Mapping[str, str], folder: Path, *, report: Callable[[str], None] = lambda _: None
) -> None:
    """Write the wheels of installed packages, given with their versions, into a folder.

    A package that was installed from its folder in editable form is built; of all others, what is
    installed is packed again, which needs neither an index nor the sources.
    """
    folder.mkdir(exist_ok=True)
    for name, version in packages.items():
        report(f"making the wheel of {name}")
        distribution, source = metadata.distribution(name), origin(name)
        if source and source.editable:
            _build(name, source.folder, folder)
        else:
            _pack(distribution, folder)
        if (normal(name), version) not in wheels_in(folder):
            raise PluginError(
                f"{name} is installed as {version}, but its folder makes another version",
                hint="install it again",
            )


def fits_any_python(name: str) -> bool:
    """Return whether an installed package has no compiled parts, which an image may not fit."""
    text = metadata.distribution(name).read_text("WHEEL") or ""
    return all(tag.endswith("-none-any") for tag in _tags(text))


def _build(name: str, source: Path, folder: Path) -> None:
    """Build a wheel with the package's own build system: installed here, else by pip."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    for isolation in (["--no-build-isolation"], []):
        try:
            process = subprocess.run(
                [*command, *isolation, "--wheel-dir", str(folder), str(source)],
                capture_output=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            why = f"pip did not finish within {_TIMEOUT} s"
            continue
        if process.returncode == 0:
            return
        lines = [line for line in process.stderr.splitlines() if "error" in line.lower()]
        why = lines[-1].strip()[:300] if lines else f"exit status {process.returncode}"
    raise PluginError(
        f"the wheel of {name} cannot be built from {source}: {why}",
        hint="build it yourself, and put it beside the Dockerfile",
    )


def _pack(distribution: metadata.Distribution, folder: Path) -> None:
    """Pack an installed package into a wheel."""
    name = distribution.name
    wheel = distribution.read_text("WHEEL")
    if not wheel or distribution.files is None:
        raise PluginError(
            f"{name} was not installed by pip, so its files are not known",
            hint="install it with pip, or put its wheel beside the Dockerfile",
        )
    contents = dict(sorted(_contents(distribution)))
    # The folder's name has the form that the wheel's has.
    info = next(path for path in contents if path.endswith(".dist-info/WHEEL")).split("/")[0]
    contents[f"{info}/RECORD"] = (
        "".join(
            f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in contents.items()
        ).encode()
        + f"{info}/RECORD,,\n".encode()
    )
    tags = "-".join(
        ".".join(dict.fromkeys(parts))
        for parts in zip(*(t.split("-") for t in _tags(wheel)), strict=True)
    )
    with zipfile.ZipFile(folder / f"{info.removesuffix('.dist-info')}-{tags}.whl", "w") as archive:
        for path, data in contents.items():
            entry = zipfile.ZipInfo(path, _DATE)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)


def _contents(distribution: metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an installed package, by their paths in a wheel."""
    site = Path(str(distribution.locate_file(""))).resolve()
    scripts = {point.name for point in distribution.entry_points if "_scripts" in point.group}
    info = ""
    files = {}
    for file in distribution.files or ():
        path = Path(str(file.locate())).resolve()
        if file.suffix == ".pyc" or (".dist-info" in file.parts[0] and file.name in _NOT_IN_WHEELS):
            continue
        if file.parts[0].endswith(".dist-info"):
            info = file.parts[0]
        files[path] = file
    data = f"{info.removesuffix('.dist-info')}.data"
    for path, file in files.items():
        try:
            content = path.read_bytes()
        except OSError:
            raise PluginError(
                f"{distribution.name} lacks its file {file}", hint="install it again"
            ) from None
        if ".." not in file.parts:
            yield file.as_posix(), content
        elif path.parent.name in ("bin", "Scripts"):
            # An installer writes those of entry points itself.
            if path.stem not in scripts:
                yield f"{data}/scripts/{path.name}", content
        elif path.is_relative_to(sys.prefix):
            yield f"{data}/data/{path.relative_to(sys.prefix).as_posix()}", content
        else:
            raise PluginError(
                f"{distribution.name} has {path}, outside of {site}",
                hint="put its wheel beside the Dockerfile",
            )


def _tags(wheel: str) -> list[str]:
    return re.findall(r"(?m)^Tag: *(\S+-\S+-\S+) *$", wheel)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def place(made: Path, target: Path) -> None:
    """Move wheels to where an image is built; other versions of the same packages are replaced."""
    new = wheels_in(made)
    names = {name for name, _ in new}
    try:
        for file in new.values():
            (made / file).replace(target / file)
        for (name, version), file in wheels_in(target).items():
            if name in names and (name, version) not in new:
                (target / file).unlink()
    except OSError as error:
        raise OutputError(f"{target} cannot be written: {error.strerror}") from None


def without_index(names: Iterable[str]) -> list[str]:
    """Return the packages that were installed here from a folder or a file."""
    return [name for name in names if (found := origin(name)) and not found.url]


def sources(versions: Mapping[str, str], wheels: Wheels, command: str) -> str:
    """Return a comment that says where packages come from; the command brings their wheels."""
    here = [name for name, version in versions.items() if (name, version) in wheels]
    missing = without_index(sorted(versions.keys() - set(here)))
    lines = []
    if here:
        lines += ["Installed from the wheels beside this file:", *wrapped(here)]
    if missing:
        lines += ["Installed here from a folder, which no image has:", *wrapped(missing)]
        lines += ["Unless an index has them, put their wheels beside this file:"]
        lines += [f"`{command}` does."]
    lines += ["All others come from an index." if lines else "All packages come from an index."]
    return "\n".join(f"# {line}" for line in lines)


def wrapped(names: Collection[str]) -> list[str]:
    return textwrap.wrap(
        ", ".join(sorted(names)), 90, initial_indent="    ", subsequent_indent="    "
    )
