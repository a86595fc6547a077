"""Gives the interpreter in Triton's stub the packages of the process that starts the server.

From Python 3.11 on, that interpreter ignores PYTHONPATH, the user's site-packages and every other
``PYTHON…`` variable (workarounds.ISOLATED_PYTHON); it only finds a virtual environment, through the
first ``python3`` on PATH. So :func:`write` creates one that contains only this module and a
``.pth`` file that imports it. A ``sitecustomize`` would not do: Debian's and Ubuntu's Python have
one of their own in the standard library. Paths alone are not enough either: editable installs work
through ``.pth`` files, which run code.

It also ignores the locale: it reads text as ASCII, and opens only ASCII paths. So UTF-8 is set as
soon as it runs, and other paths are replaced by links with ASCII paths.
"""

from __future__ import annotations

import io
import json
import locale
import site
import sys
from contextlib import suppress
from pathlib import Path

_NAME = "llmserve_stub_site"


def write(folder: Path) -> Path:
    """Write a virtual environment that refers to this process's own; return its ``bin``."""
    links = folder / "paths"
    links.mkdir(parents=True)

    def in_ascii(path: str) -> str:
        if path.isascii():
            return path
        link = links / str(len(list(links.iterdir())))
        link.symlink_to(path)
        return str(link)

    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    prefix = in_ascii(sys.prefix)
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    inherited = {
        # Below the prefix, so that it recognizes the virtual environment that it belongs to.
        "executable": sys.executable.replace(sys.prefix, prefix, 1),
        "prefix": prefix,
        "exec_prefix": in_ascii(sys.exec_prefix),
        "sites": [
            in_ascii(path) for path in (*site.getsitepackages(), *user) if Path(path).is_dir()
        ],
        "path": [in_ascii(str(Path(path).absolute())) for path in sys.path],
    }
    (packages / "inherit.json").write_text(json.dumps(inherited), encoding="utf-8")
    (packages / f"{_NAME}.py").symlink_to(Path(__file__).absolute())
    (packages / f"{_NAME}.pth").write_text(f"import {_NAME}\n", encoding="utf-8")
    (folder / "pyvenv.cfg").write_text(
        f"home = {in_ascii(sys.base_prefix)}/bin\ninclude-system-site-packages = false\n",
        encoding="utf-8",
    )
    programs = folder / "bin"
    programs.mkdir()
    (programs / "python3").symlink_to(Path(sys.executable).resolve())
    return programs


def use_utf8() -> None:
    for name in ("C.UTF-8", "en_US.UTF-8"):
        with suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
            break
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def take_over() -> None:
    """Take over the paths of the process that wrote this environment, with editable installs."""
    # Not resolved: this file is a link, and inherit.json is next to the link.
    here = Path(__file__).parent
    inherited = json.loads((here / "inherit.json").read_text(encoding="utf-8"))
    sys.executable = inherited["executable"]
    sys.prefix = inherited["prefix"]
    sys.exec_prefix = inherited["exec_prefix"]
    for folder in inherited["sites"]:
        site.addsitedir(folder)
    skipped = {*inherited["path"], str(here)}
    sys.path[:] = [*inherited["path"], *(path for path in sys.path if path not in skipped)]


if __name__ == _NAME:
    # The locale determines how the environment's files are read.
    use_utf8()
    take_over()
