"""The graph as TorchScript: traced, and frozen into one file that libtorch loads."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from llmserve_gpt2.export import names
from llmserve_gpt2.export.check import Arrays, Runner
from llmserve_gpt2.export.model import Shape, example

FILE = "model.pt"
# It has no types of its own.
_JIT: Any = torch.jit
_EPOCH = (1980, 1, 1, 0, 0, 0)
_ALIGNED = 64
_CODE = (".py", "data.pkl")
_MANGLED = re.compile(rb"___torch_mangle_\d+")


def write(step: torch.nn.Module, shape: Shape, folder: Path) -> None:
    """Trace a step; the same model gives the same bytes."""
    with torch.inference_mode(False), torch.no_grad():
        # What the tracer warns of are decisions by shape; the check runs other shapes.
        traced = _JIT.trace(step, example(shape), check_trace=False)
        traced = _JIT.freeze(traced.eval())
    draft = folder / f".{FILE}"
    _JIT.save(traced, str(draft))
    _rewrite(draft, folder / FILE)
    draft.unlink()


def load(folder: Path) -> Runner:
    module = _JIT.load(str(folder / FILE), map_location="cpu")
    fed: list[str] = list(names.INPUTS)
    given = [names.LOGITS]

    def run(feeds: Arrays) -> Arrays:
        states = [(name, name.replace("past", "present")) for name in feeds if name not in fed]
        pairs = names.states(len(states) // 2)
        with torch.inference_mode(), _JIT.optimized_execution(False):
            outputs = module(
                *(torch.from_numpy(feeds[name]) for name in [*fed, *(past for past, _ in pairs)])
            )
        told = [*given, *(present for _, present in pairs)]
        return dict(zip(told, (output.numpy() for output in outputs), strict=True))

    return run


def _rewrite(draft: Path, target: Path) -> None:
    """Copy the archive without what differs from run to run, or tells of this machine.

    Left out are the source lines that each node came from and a random id. Weights stay at
    multiples of 64 bytes, where libtorch maps them from.
    """
    with zipfile.ZipFile(draft) as old, target.open("wb") as stream:
        numbers: dict[bytes, bytes] = {}

        def settled(content: bytes) -> bytes:
            # torch counts, over the whole process, the modules that it has compiled.
            def number(match: re.Match[bytes]) -> bytes:
                return numbers.setdefault(match[0], b"___torch_mangle_%d" % len(numbers))

            return _MANGLED.sub(number, content)

        root = old.namelist()[0].split("/")[0]
        with zipfile.ZipFile(stream, "w") as new:
            for name in old.namelist():
                if name.endswith((".debug_pkl", "/serialization_id")):
                    continue
                path = settled(f"model{name.removeprefix(root)}".encode()).decode()
                content = old.read(name)
                info = zipfile.ZipInfo(path, _EPOCH)
                info.extra = _padding(-(stream.tell() + 30 + len(path)) % _ALIGNED)
                new.writestr(info, settled(content) if name.endswith(_CODE) else content)


def _padding(length: int) -> bytes:
    """Return an extra field of so many bytes, or of 64 more: its head alone takes four."""
    length += _ALIGNED if length < 4 else 0
    return b"FB" + (length - 4).to_bytes(2, "little") + b"Z" * (length - 4)
