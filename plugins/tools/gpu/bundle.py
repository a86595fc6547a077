"""Packs what a machine without a network needs beside PyTorch and transformers.

    python -m plugins.tools.gpu.bundle [--python 3.12] [--out build/gpu-bundle]

The result is a folder with one archive, the packages of this checkout and all that they need, for
the given version of Python on Linux x86-64, whichever version packs it. The embedded Triton is
packed without what only other versions of Python need.
"""

from __future__ import annotations

import argparse
import lzma
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

from .environment import ARCHIVE, FROM_THE_MACHINE, PYTHON
from .requirements import closure

ROOT = Path(__file__).parents[3]
CONTENTS = "contents.txt"
LIMIT = 56_000_000
"""Bytes that a bundle may take: some ways to a machine behind a firewall are narrow."""

OURS = {
    "llmserve[embedded,constrained]": ".",
    "llmserve-hf": "plugins/hf",
    "llmserve-iterative": "plugins/iterative",
    "llmserve-gateway": "plugins/gateway",
}
"""What is packed, by the folder that it is built from."""

# Of this only the server is used, not the package around it.
_SERVER = "nvidia-pytriton"
# The newest first: pip accepts a wheel for one of the platforms that it is told.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 26, 24, 17)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
_READ_ME = """\
llmserve for a machine without a network: Linux x86-64, Python {python}, torch and transformers.
In a checkout, this says what is true on that machine:

    python{python} -m plugins.tools.gpu --bundle {folder}

For anything else, the same environment to keep: the packages of the archive, and of the machine's
only torch, transformers and what these need (all others could need a newer numpy):

    python{python} -c 'import pathlib as p; from plugins.tools.gpu.environment import create; \
        create(p.Path("{folder}"), p.Path("llmserve"))'
    llmserve/bin/python -m llmserve_cli --help
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="3.12", help="The version on the other machine.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-bundle")
    parser.add_argument("--level", type=int, default=6, help="Of compression; 0 is fast, 9 small.")
    args = parser.parse_args(arguments)
    if args.python not in ("3.10", "3.11", "3.12"):
        parser.error(f"the embedded Triton runs on Python 3.10 to 3.12, not on {args.python}")
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site = Path(scratch, "wheels"), Path(scratch, "site")
        download(args.python, wheels)
        build(wheels)
        contents = [unpack(wheel, site, args.python) for wheel in sorted(wheels.glob("*.whl"))]
        compress(site, args.out / ARCHIVE, args.level)
    size = (args.out / ARCHIVE).stat().st_size
    (args.out / PYTHON).write_text(f"{args.python}\n")
    (args.out / CONTENTS).write_text("\n".join(contents) + "\n")
    read_me = _READ_ME.format(python=args.python, folder=args.out.name)
    (args.out / "README.txt").write_text(read_me)
    print(f"{args.out}: {size / 1e6:.1f} MB, {time.monotonic() - started:.0f} s")
    if size > LIMIT and args.level >= 6:
        sys.exit(f"that is more than {LIMIT / 1e6:.0f} MB: leave something out")


def download(python: str, wheels: Path) -> None:
    """Fetch the wheels that the other machine's Python would choose."""
    version = python.replace(".", "")
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    abis = [word for name in (f"cp{version}", "abi3", "none") for word in ("--abi", name)]
    _pip(
        "download", "--only-binary=:all:", "--no-deps", "--implementation", "cp",
        "--python-version", python, *platforms, *abis,
        "-c", str(_constraints(python, wheels)), "-d", str(wheels), *sorted(needed(python)),
    )  # fmt: skip


def needed(python: str) -> set[str]:
    """Return the distributions to fetch: all but ours and what the other machine has."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    ours = [*OURS, "pytest"]
    there = closure(FROM_THE_MACHINE, environment=environment)
    everything = closure(ours, environment=environment, without=(_SERVER,))
    # What transformers shares with it stays as transformers found it. The rest comes along even if
    # the machine should have it, numpy above all: its own may be too new for the embedded Triton.
    shared = (_SERVER, *FROM_THE_MACHINE, "accelerate")
    direct = closure(ours, environment=environment, without=shared)
    names = (everything - there) | (direct - set(FROM_THE_MACHINE))
    return names - {Requirement(name).name for name in OURS}


def _constraints(python: str, wheels: Path) -> Path:
    """Write the constraints for that version: pip reads the markers of the one that runs it."""
    wheels.mkdir(parents=True)
    file = wheels / "constraints.txt"
    lines = []
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        pin, _, marker = line.partition(";")
        newer = int(python.partition(".")[2]) >= 11
        if not marker or (">=" in marker) == newer:
            lines.append(pin)
    file.write_text("\n".join(lines) + "\n")
    return file


def build(wheels: Path) -> None:
    """Build the wheels of this checkout."""
    folders = [str(ROOT / folder) for folder in OURS.values()]
    # Without isolation, it need not be fetched again for each of them.
    isolation = [] if find_spec("hatchling") is None else ["--no-build-isolation"]
    _pip("wheel", "--no-deps", *isolation, "--wheel-dir", str(wheels), *folders)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, check=False, capture_output=True, encoding="utf-8")
    if result.returncode:
        sys.exit(f"pip {arguments[0]} failed:\n{result.stderr}")


def unpack(wheel: Path, site: Path, python: str) -> str:
    """Unpack what is needed of a wheel; return a line that says what it is."""
    with zipfile.ZipFile(wheel) as archive:
        files = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
        names = [name for name in files if _is_needed(PurePosixPath(name), python)]
        for name in names:
            target = Path(archive.extract(name, site))
            # The zip format keeps the mode in the upper half; unpacking ignores it.
            target.chmod((archive.getinfo(name).external_attr >> 16) & 0o755 or 0o644)
        size = sum(archive.getinfo(name).file_size for name in names)
    name, version = wheel.name.split("-")[:2]
    return f"{name} {version}: {size / 1e6:.1f} MB unpacked"


def _is_needed(path: PurePosixPath, python: str) -> bool:
    top = path.parts[0]
    if (path.suffix == ".pyi" and not top.startswith("llmserve")) or top.endswith(".data"):
        return False
    if top == "pytriton":
        # The server, not the Python package around it.
        stub = "python_backend_stubs"
        return path.parts[1] == "tritonserver" and (stub not in path.parts or python in path.parts)
    if top == "nvidia_pytriton.libs":
        # Of the stub of another version.
        return not path.name.startswith("libpython")
    return top != "numpy" or "tests" not in path.parts


def compress(site: Path, archive: Path, level: int) -> None:
    # Machine code compresses better if the addresses of jumps are rewritten first.
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": level}]
    with (
        lzma.open(archive, "wb", filters=filters) as out,
        tarfile.open(fileobj=out, mode="w|") as tar,
    ):
        for path in _files(site):
            tar.add(path, str(path.relative_to(site)), recursive=False, filter=_anonymous)


def _files(site: Path) -> Iterator[Path]:
    # Files of one kind side by side, which the compression gains from.
    paths = (path for path in site.rglob("*") if path.is_file())
    return iter(sorted(paths, key=lambda path: (path.suffix, path)))


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    return member


if __name__ == "__main__":
    main()
