"""Make an embedded interpreter see the packages that the process which starts the server sees.

From Python 3.11 on, the interpreter in Triton's stub ignores PYTHONPATH, the user's
site-packages and every other ``PYTHON…`` variable; all it finds is a virtual environment, by way
of the first ``python3`` on PATH. So it is given one (:func:`write`) in which there is
nothing but this module, as ``sitecustomize``. Paths alone would not do: editable installs work
through ``.pth`` files, which run code.
"""

from __future__ import annotations

import importlib
import json
import site
import sys
from pathlib import Path


def write(folder: Path) -> Path:
    """Write a virtual environment that leads back to this process's; return its ``bin``."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    seen = {
        "executable": sys.executable,
        "prefix": sys.prefix,
        "exec_prefix": sys.exec_prefix,
        "sites": [path for path in (*site.getsitepackages(), *user) if Path(path).is_dir()],
        "path": [str(Path(path).absolute()) for path in sys.path],
    }
    (packages / "inherit.json").write_text(json.dumps(seen), encoding="utf-8")
    (packages / "sitecustomize.py").symlink_to(Path(__file__).absolute())
    (folder / "pyvenv.cfg").write_text(
        f"home = {sys.base_prefix}/bin\ninclude-system-site-packages = false\n", encoding="utf-8"
    )
    programs = folder / "bin"
    programs.mkdir()
    (programs / "python3").symlink_to(Path(sys.executable).resolve())
    return programs


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
    take_over()
