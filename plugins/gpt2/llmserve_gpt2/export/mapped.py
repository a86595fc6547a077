"""Loads a model in float32 whose weights stay in a file, from where they are mapped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from llmserve.plugin import loaded_files

_WHOLE = "model.safetensors"
_WEIGHTS = (".safetensors", ".bin", ".index.json")
_WIDENED = (torch.bfloat16, torch.float16)
# How many values of a weight are widened at a time.
_PIECE = 1 << 24


@contextmanager
def load(source: Path, scratch: Path, *, pickle: bool, trust_remote_code: bool) -> Iterator[Any]:
    """Load a model; as long as it is used, ``scratch`` has its weights in float32.

    Weights that are not in safetensors are in memory instead.
    """
    with TemporaryDirectory(dir=scratch) as folder:
        weights, types = _weights_in(source)
        if any(weight.dtype in _WIDENED for weight in weights.values()):
            for path in source.iterdir():
                if not path.name.endswith(_WEIGHTS):
                    (Path(folder) / path.name).symlink_to(path.resolve())
            _write(weights, types, Path(folder) / _WHOLE)
            source = Path(folder)
        yield AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            # Plain products, which ONNX Runtime fuses; other forms transpose all keys per token.
            attn_implementation="eager",
            use_safetensors=None if pickle else True,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        ).eval()


def _weights_in(source: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return what the files have, which is mapped, and what they call the types."""
    weights: dict[str, torch.Tensor] = {}
    types: dict[str, str] = {}
    for path in loaded_files(source, _WHOLE, "*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                weights[name] = file.get_tensor(name)
                types[name] = file.get_slice(name).get_dtype()
    return weights, types


def _write(weights: Mapping[str, torch.Tensor], types: Mapping[str, str], target: Path) -> None:
    """Write weights into a file of safetensors, a piece of one at a time."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        is_widened = weight.dtype in _WIDENED
        begin, end = end, end + weight.numel() * (4 if is_widened else weight.itemsize)
        described[name] = {
            "dtype": "F32" if is_widened else types[name],
            "shape": list(weight.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(described).encode()
    # The format has the weights begin at a multiple of eight.
    header += b" " * (-len(header) % 8)
    with target.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for weight in weights.values():
            flat = weight.reshape(-1)
            for start in range(0, len(flat), _PIECE):
                piece = flat[start : start + _PIECE]
                values = piece.float() if weight.dtype in _WIDENED else piece
                stream.write(values.view(torch.uint8).numpy().data)
