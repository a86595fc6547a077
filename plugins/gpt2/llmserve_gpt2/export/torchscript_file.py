"""Exports the graph to TorchScript: traces it and freezes it into one file for libtorch."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

from llmserve_gpt2 import MOST_READ
from llmserve_gpt2.export import names
from llmserve_gpt2.export.check import Arrays, Runner
from llmserve_gpt2.export.model import Shape, example

FILE = "model.pt"
# torch.jit has no type annotations.
_JIT: Any = torch.jit
_EPOCH = (1980, 1, 1, 0, 0, 0)
_ALIGNMENT = 64
_PIECE = 1 << 20
_CODE = (".py", "data.pkl")
_MANGLED = re.compile(rb"___torch_mangle_\d+")


def write(step: torch.nn.Module, shape: Shape, folder: Path) -> Runner:
    """Trace a step, and return what runs the file; the same model gives the same bytes.

    Where the weights are too large to be read, what was written runs, and the file is only read
    through.
    """
    with torch.inference_mode(False), torch.no_grad():
        # The tracer warns about decisions that depend on shapes; the check runs other shapes.
        traced = _JIT.trace(step, example(shape), check_trace=False)
        traced = _JIT.freeze(traced.eval())
    draft = folder / f".{FILE}"
    _JIT.save(traced, str(draft))
    _rewrite(draft, folder / FILE)
    draft.unlink()
    if 4 * shape.weights > MOST_READ:
        read_through(folder / FILE)
        return _runner(traced)
    return _runner(_JIT.load(str(folder / FILE), map_location="cpu"))


def read_through(file: Path) -> None:
    """Raise :class:`ValueError` if a file does not have what was written."""
    with zipfile.ZipFile(file) as archive:
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"{damaged} in it is not what was written")


def _runner(module: Any) -> Runner:
    def run(feeds: Arrays) -> Arrays:
        states = [name for name in feeds if name not in names.INPUTS]
        pairs = names.states(len(states) // 2)
        inputs = [*names.INPUTS, *(past for past, _ in pairs)]
        with torch.inference_mode(), _JIT.optimized_execution(False):
            results = module(*(torch.from_numpy(feeds[name]) for name in inputs))
        outputs = [names.LOGITS, *(present for _, present in pairs)]
        return dict(zip(outputs, (result.numpy() for result in results), strict=True))

    return run


def _rewrite(draft: Path, target: Path) -> None:
    """Copy the archive without parts that differ between runs or describe this machine.

    It leaves out the source lines of each node and a random id. Weights stay aligned to 64 bytes,
    as libtorch writes them.
    """
    with zipfile.ZipFile(draft) as old, target.open("wb") as stream:
        numbers: dict[bytes, bytes] = {}

        def renumbered(content: bytes) -> bytes:
            # torch numbers all modules that the process has compiled.
            def number(match: re.Match[bytes]) -> bytes:
                return numbers.setdefault(match[0], b"___torch_mangle_%d" % len(numbers))

            return _MANGLED.sub(number, content)

        root = old.namelist()[0].split("/")[0]
        with zipfile.ZipFile(stream, "w") as new:
            for name in old.namelist():
                if name.endswith((".debug_pkl", "/serialization_id")):
                    continue
                path = renumbered(f"model{name.removeprefix(root)}".encode()).decode()
                info = zipfile.ZipInfo(path, _EPOCH)
                info.extra = _padding(-(stream.tell() + 30 + len(path)) % _ALIGNMENT)
                if name.endswith(_CODE):
                    new.writestr(info, renumbered(old.read(name)))
                    continue
                info.file_size = old.getinfo(name).file_size
                with old.open(name) as source, new.open(info, "w") as copy:
                    shutil.copyfileobj(source, copy, _PIECE)


def _padding(length: int) -> bytes:
    """Return an extra field of this many bytes, or of 64 more: its header needs four."""
    length += _ALIGNMENT if length < 4 else 0
    return b"FB" + (length - 4).to_bytes(2, "little") + b"Z" * (length - 4)
