"""An environment with a bundle's packages, and of the machine's own only torch and transformers.

An environment that sees all packages of the machine would not do: beside the numpy that the
embedded Triton needs, others of them (SciPy, scikit-learn) fail as soon as transformers finds them.
"""

from __future__ import annotations

import sys
import tarfile
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from .requirements import closure

ARCHIVE = "site.tar.xz"
PYTHON = "python.txt"
"""The files of a bundle that an environment is made from."""

FROM_THE_MACHINE = ("torch", "transformers")


class SetupError(Exception):
    """The environment cannot be made; the message says why."""


def create(bundle: Path, folder: Path) -> Path:
    """Create the environment and return its Python."""
    if not (bundle / ARCHIVE).is_file():
        raise SetupError(f"{bundle} has no {ARCHIVE}: make gpu-bundle writes it")
    wanted, running = (bundle / PYTHON).read_text().strip(), "{}.{}".format(*sys.version_info[:2])
    if wanted != running:
        raise SetupError(f"this bundle is for Python {wanted}, and this is {running}")
    # The packages are unpacked, not installed: pip may be missing.
    venv.create(folder, clear=True, symlinks=True, with_pip=False)
    site = folder / "lib" / f"python{running}" / "site-packages"
    with tarfile.open(bundle / ARCHIVE) as archive:
        # The first releases of 3.10 and 3.11 have no filters; the bundle is the user's own.
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(site, **safely)
    link(site)
    return folder / "bin" / "python"


def link(site: Path) -> None:
    """Link the machine's torch and transformers, and what they need, into ``site``."""
    packed = {canonicalize_name(found.name) for found in metadata.distributions(path=[str(site)])}
    for name in sorted(closure(FROM_THE_MACHINE) - packed):
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name in FROM_THE_MACHINE:
                raise SetupError(f"this Python has no {name}") from None
            # Python finds what is really missing soon enough, and says so.
            continue
        for path in _top_level(distribution):
            target = site / path.name
            if path.exists() and not target.exists():
                target.symlink_to(path)


def _top_level(distribution: metadata.Distribution) -> set[Path]:
    """Return the files and folders that a distribution has in its site-packages."""
    home = Path(str(distribution.locate_file("")))
    tops = {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
    return {home / top for top in tops if top != "__pycache__"}
