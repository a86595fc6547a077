"""``make release-check``: what is released is built, installed without the checkout, and serves.

``dist`` holds what was checked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from llmserve import __version__

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
INSTALLED = ("hf", "iterative", "gateway")
"""The plugins that `make demo` installs; the others are installed without what they need."""


def run(*command: str | Path, folder: Path, **environment: str) -> None:
    print("$", *command, flush=True)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, cwd=folder, check=True, env={**clean, **environment})


def build() -> list[Path]:
    shutil.rmtree(DIST, ignore_errors=True)
    for project in (ROOT, *PLUGINS):
        run(sys.executable, "-m", "hatchling", "build", "--directory", DIST, folder=project)
    built = sorted(DIST.iterdir())
    assert len(built) == 2 * (1 + len(PLUGINS)), built
    assert all(f"-{__version__}" in path.name for path in built), "one version for all"
    return built


def wheels(built: list[Path], names: tuple[str, ...]) -> list[Path]:
    starts = tuple(f"{name.replace('-', '_')}-" for name in names)
    return [path for path in built if path.suffix == ".whl" and path.name.startswith(starts)]


def check(built: list[Path], python: str, folder: Path) -> None:
    run(python, "-m", "venv", folder / "venv", folder=folder)
    ours = folder / "venv" / "bin"
    install = (ours / "python", "-m", "pip", "install", "--quiet")
    core = wheels(built, ("llmserve",))[0]
    served = wheels(built, tuple(f"llmserve-{name}" for name in INSTALLED))
    extras = f"llmserve[embedded,constrained,test] @ {core.as_uri()}"
    run(*install, "-c", ROOT / "constraints.txt", extras, *served, folder=folder)
    run(*install, "--no-deps", *(path for path in built if path.suffix == ".whl"), folder=folder)
    run(ours / "llmserve", "demo", folder=folder)
    run(ours / "llmserve", "plugin", "new", "acme", "--role", "tokenizer", folder=folder)
    acme = folder / "llmserve-acme"
    run(*install, "--no-deps", acme, folder=folder)
    run(ours / "pytest", "-q", folder=acme)
    for source in (path for path in built if path.name.endswith(".tar.gz")):
        # A wheel from the source distribution: it has all that a build needs.
        wheel = (*install[:3], "wheel", "--quiet", "--no-deps", "-w", folder / "again", source)
        run(*wheel, folder=folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--tag", default="", help="the tag of the release")
    arguments = parser.parse_args()
    if arguments.tag and arguments.tag != f"v{__version__}":
        sys.exit(f"the tag is {arguments.tag}, and llmserve/version.py says {__version__}")
    with tempfile.TemporaryDirectory() as folder:
        check(build(), arguments.python, Path(folder))
    print(f"{DIST} can be released")


if __name__ == "__main__":
    main()
