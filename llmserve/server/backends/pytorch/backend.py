"""TorchScript with the torch of PyPI, on CPU or GPU: only what llmserve has built."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.server.backends.native.engine import Array
from llmserve.server.backends.native.serving import Place, Serving
from llmserve.server.backends.pytorch import onednn

_MANIFEST = "llmserve.json"


class Graph:
    """A TorchScript module; its values are tensors on its device."""

    def __init__(self, place: Place) -> None:
        import torch

        self._torch: Any = torch
        path = place.file("model.pt")
        check_built_here(path, place.home)
        parameters = place.config.get("parameters") or {}
        self._device = "cpu" if place.device is None else f"cuda:{place.device}"
        if place.device is not None and not torch.cuda.is_available():
            raise RuntimeError("this torch finds no GPU: build the model with --device cpu")
        self._optimized = _text(parameters, "DISABLE_OPTIMIZED_EXECUTION") != "true"
        self._module = self._torch.jit.load(str(path), map_location=self._device).eval()
        if place.device is None:
            onednn.use(self._module)
        self.name = f"torch {torch.__version__} ({self._device})"
        sequence = place.config.get("sequence_batching") or {}
        states = sequence.get("state") or []
        taken = [tensor["name"] for tensor in place.config["input"]]
        given = [tensor["name"] for tensor in place.config["output"]]
        self._order = _by_index([*taken, *(state["input_name"] for state in states)])
        self._given = _by_index([*given, *(state["output_name"] for state in states)])
        self.inputs = frozenset(self._order)

    def value(self, array: Array) -> Any:
        """Bring an array to the device."""
        return self._torch.from_numpy(array.copy()).to(self._device)

    def array(self, value: Any) -> Array:
        """Bring a value back."""
        return value.cpu().numpy()  # type: ignore[no-any-return]

    def shape(self, value: Any) -> tuple[int, ...]:
        """Return a value's shape."""
        return tuple(value.shape)

    def row(self, value: Any, index: int) -> Any:
        """Return one row, without a copy."""
        return value[index : index + 1]

    def join(self, rows: Sequence[Any]) -> Any:
        """Make one value of rows."""
        return self._torch.cat(list(rows))

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
        """Run the graph; nothing leaves the device."""
        with self._torch.inference_mode(), self._torch.jit.optimized_execution(self._optimized):
            answer = self._module(*(feeds[name] for name in self._order))
        values = answer if isinstance(answer, tuple) else (answer,)
        found = dict(zip(self._given, values, strict=False))
        return {name: found[name] for name in outputs}


def check_built_here(path: Path, home: Path) -> None:
    """Refuse a file that llmserve has not built: TorchScript can run any code."""
    try:
        manifest = json.loads((home / _MANIFEST).read_text(encoding="utf-8"))
        expected = manifest["files"][path.relative_to(home).as_posix()]
    except (OSError, ValueError, KeyError, TypeError):
        expected = None
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise RuntimeError(
            f"{path.name} is not what llmserve built, and TorchScript can run any code: build the "
            "model again, or serve it in NVIDIA's container"
        )


def _text(parameters: Mapping[str, Any], name: str) -> str:
    return str((parameters.get(name) or {}).get("string_value", ""))


def _by_index(names: Sequence[str]) -> list[str]:
    """Order tensors as libtorch's backend does: by ``name__index``, else as configured."""
    ends = {name: name.partition("__")[2] for name in names}
    if all(end.isdigit() for end in ends.values()):
        return sorted(names, key=lambda name: int(ends[name]))
    return list(names)


class TritonPythonModel:
    """The model as Triton's Python backend knows it."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the graph; Triton calls this once."""
        import triton_python_backend_utils as pb_utils

        place = Place.read(args)
        self._serving = Serving(Graph(place), place, pb_utils)

    def execute(self, requests: Sequence[Any]) -> Sequence[Any]:
        """Answer requests; Triton calls this for every batch."""
        return self._serving.execute(requests)

    def finalize(self) -> None:
        """Let go; Triton calls this once nothing is under way any more."""
        if hasattr(self, "_serving"):
            self._serving.close()
