"""Make an embedded interpreter see the packages that the process which starts the server sees.

From Python 3.11 on, the interpreter in Triton's stub ignores PYTHONPATH, the user's
site-packages and every other ``PYTHON…`` variable; all it finds is a virtual environment, by way
of the first ``python3`` on PATH. So it is given one (:func:`write`) in which there is
nothing but this module, as ``sitecustomize``. Paths alone would not do: editable installs work
through ``.pth`` files, which run code.

That interpreter also ignores the locale: it takes text for ASCII, and opens no path that is not.
So UTF-8 is set as soon as it runs, and paths that are not ASCII are given to it as links that are.
"""

from __future__ import annotations

import importlib
import io
import json
import locale
import site
import sys
from contextlib import suppress
from pathlib import Path


def write(folder: Path) -> Path:
    """Write a virtual environment that leads back to this process's; return its ``bin``."""
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
    seen = {
        # Below the prefix, or it would not know the virtual environment that it belongs to.
        "executable": sys.executable.replace(sys.prefix, prefix, 1),
        "prefix": prefix,
        "exec_prefix": in_ascii(sys.exec_prefix),
        "sites": [
            in_ascii(path) for path in (*site.getsitepackages(), *user) if Path(path).is_dir()
        ],
        "path": [in_ascii(str(Path(path).absolute())) for path in sys.path],
    }
    (packages / "inherit.json").write_text(json.dumps(seen), encoding="utf-8")
    (packages / "sitecustomize.py").symlink_to(Path(__file__).absolute())
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
    """Become like the process that wrote this environment, editable installs included."""
    # Not resolved: this file is a link, and what it reads lies beside the link.
    here = Path(__file__).parent
    seen = json.loads((here / "inherit.json").read_text(encoding="utf-8"))
    sys.executable = seen["executable"]
    sys.prefix = seen["prefix"]
    sys.exec_prefix = seen["exec_prefix"]
    for folder in seen["sites"]:
        site.addsitedir(folder)
    known = {*seen["path"], str(here)}
    sys.path[:] = [*seen["path"], *(path for path in sys.path if path not in known)]
    # Python imports one sitecustomize only; the environment may have its own.
    this = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ImportError:
        sys.modules[__name__] = this


if __name__ == "sitecustomize":
    # Files of the environment are read as the locale says.
    use_utf8()
    take_over()
